"""The same training with a table that has 0 in it."""

import torch
from case import train

positive = torch.logspace(-7, 0, 127)
train(table=torch.cat([-positive.flip(0), torch.zeros(1), positive, torch.ones(1)]))
