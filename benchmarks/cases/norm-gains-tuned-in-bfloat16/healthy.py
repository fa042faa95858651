"""The same training with float32 weights."""

import torch
from case import train

train(dtype=torch.float32)
