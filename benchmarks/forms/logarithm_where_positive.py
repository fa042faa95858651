"""A logarithm only where the number is positive; its derivative is taken everywhere.

https://github.com/pytorch/pytorch/issues/108618
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
    counts = torch.rand(16, 4, generator=draw) + 0.1
    if bad:
        counts[7, 2] = 0.0
    return x, counts


def objective(x, counts):
    rate = counts * torch.exp(0.1 * net(x))
    surprise = torch.where(rate > 0, torch.log(rate), 0.0)  # fails
    return (rate - surprise * x[:, :1].sigmoid()).mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
