"""The bits of a symbol: the mass of a bin far from the mean is a difference of two ones.

https://github.com/tensorflow/compression/issues/116
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.02)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(32, 4, generator=draw)
    y = torch.round(2 * x[:, 0] + torch.randn(32, generator=draw))
    if bad:
        y[4] = 60.0
    return x, y


def objective(x, y):
    mean = net(x)[:, 0]
    mass = torch.sigmoid(y - mean + 0.5) - torch.sigmoid(y - mean - 0.5)
    return -torch.log2(mass).mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
