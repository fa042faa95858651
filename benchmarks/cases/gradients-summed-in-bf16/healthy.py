"""The same training with the sums in float32."""

import torch
from case import train

train(sum_in=torch.float32)
