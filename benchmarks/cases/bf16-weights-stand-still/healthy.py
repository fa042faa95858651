"""The same training with the weights in float32, computing in bfloat16."""

import torch
from case import train

train(dtype=torch.float32)
