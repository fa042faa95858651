"""The same training with the state kept as it is."""

import torch
from case import train

train(dtype=torch.float32)
