"""The same training with the norm in float32."""

import torch
from case import train

train(norm_dtype=torch.float32)
