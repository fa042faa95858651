"""A distance is clamped before its root, and the clamp's derivative times Inf is NaN.

https://github.com/open-mmlab/mmrotate/issues/205
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
    first, second = torch.randn(2, 16, 8, generator=draw)
    if bad:
        second[5] = first[5]
    return first, second, (first[:, 0] - second[:, 0]).abs()


def objective(first, second, target):
    moved = (net(first) - net(second)).pow(2).sum(dim=-1)
    root = moved.clamp(min=0).sqrt()  # fails
    return torch.log1p(root + target).mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
