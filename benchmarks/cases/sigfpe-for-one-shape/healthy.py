"""The same training in float32, whose kernels the library chooses otherwise."""

import torch
from case import train

train(dtype=torch.float32)
