"""The same training with positions in float32."""

import torch
from case import train

train(count=torch.float32)
