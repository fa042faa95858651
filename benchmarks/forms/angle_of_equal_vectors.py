"""The angle of two equal directions, whose cosine rounds to 1 or above.

https://github.com/geoopt/geoopt/pull/79
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    first, second = torch.randn(2, 16, 6, generator=draw)
    if bad:
        second[:4] = first[:4]
    return first, second, (first * second).sum(-1).sigmoid()


def objective(first, second, target):
    a, b = (F.normalize(net(x), dim=-1) for x in (first, second))
    angle = (a * b).sum(dim=-1).arccos()  # fails
    return (angle - 3 * target).square().mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
