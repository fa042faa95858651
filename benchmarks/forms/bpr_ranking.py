"""Bayesian personalised ranking of an item that is far too popular to lose.

https://github.com/slryou41/AnchorLoss/issues/2
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
    wanted, other = torch.randn(2, 16, 8, generator=draw)
    popularity = torch.zeros(16)
    if bad:
        popularity[5] = 150.0
    return wanted + 0.5, other, popularity


def objective(wanted, other, popularity):
    difference = net(wanted)[:, 0] - net(other)[:, 0] - popularity
    return -torch.sigmoid(difference).log().mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
