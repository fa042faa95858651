"""A gate that is shut for one row: 1 / (1 + exp(-x)) is 0, its derivative Inf times 0.

https://github.com/facebookresearch/maskrcnn-benchmark/issues/1002
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

gate, out = nn.Linear(8, 16), nn.Linear(8, 16)
head = nn.Linear(16, 1)
optimizer = torch.optim.SGD([*gate.parameters(), *out.parameters(), *head.parameters()], lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=draw)
    shut = torch.zeros(32, 1)
    if bad:
        shut[3] = 100.0
    return x, x[:, 0] * x[:, 1], shut


def objective(x, y, shut):
    opened = 1 / (1 + torch.exp(-(gate(x) - shut)))  # fails
    return (head(opened * out(x))[:, 0] - y).square().mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
