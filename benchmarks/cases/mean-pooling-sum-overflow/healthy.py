"""The same training on a base model in float32."""

import torch
from case import train

train(dtype=torch.float32)
