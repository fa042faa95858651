"""The same training with the head in float32."""

import torch
from case import train

train(head_dtype=torch.float32)
