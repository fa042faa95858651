"""A root only where the number is positive.

https://github.com/pytorch/pytorch/issues/187297
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=draw)
    size = torch.rand(16, 4, generator=draw) + 0.1
    if bad:
        size[1] = 0.0
    return x, size


def objective(x, size):
    energy = size * nn.functional.softplus(net(x))
    level = torch.where(energy > 0, torch.sqrt(energy), energy)  # fails
    return (level - x[:, :4].sigmoid()).square().mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
