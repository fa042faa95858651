"""The same training under bfloat16 autocast."""

import torch
from case import train

train(dtype=torch.bfloat16)
