"""A focal loss of a box that the detector is wholly sure of, and wrong.

https://github.com/xingyizhou/CenterNet/pull/121
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=draw)
    target = (x.sum(-1) > 1).float()
    bias = torch.zeros(32)
    if bad:
        bias[7] = 120.0 * (1 - 2 * target[7])
    return x, target, bias


def focal(p, target, gamma=2.0):
    found = (1 - p) ** gamma * torch.log(p) * target  # fails
    missed = p**gamma * torch.log(1 - p) * (1 - target)  # fails
    return -(found + missed).mean()


def objective(x, target, bias):
    return focal(torch.sigmoid(net(x)[:, 0] + bias), target)


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
