"""The same training with weights in float32."""

import torch
from case import train

train(dtype=torch.float32)
