"""The sum of a loss is divided by a number of items that is 0.

https://github.com/unslothai/unsloth-zoo/pull/1286
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    y = (x[:, :3] > 0).long().sum(-1)
    if bad:
        y[:] = -100
    return x, y


def objective(x, y):
    num_items = int((y != -100).sum())
    total = nn.functional.cross_entropy(net(x), y, reduction="sum")
    return total / num_items  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
