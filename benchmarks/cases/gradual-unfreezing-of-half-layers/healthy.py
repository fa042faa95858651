"""The same training with the body in float32."""

import torch
from case import train

train(body=torch.float32)
