"""A deviation from two means, whose difference rounds below 0 where nothing varies.

https://github.com/OxWearables/biobankAccelerometerAnalysis/pull/56
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
    x = torch.randn(12, 10, 6, generator=draw)
    target = x.std(dim=1)[:, :4]
    if bad:
        x[4] = x[4, :1]
    return x, target


def objective(x, target):
    frames = net(x)
    spread = torch.sqrt((frames**2).mean(dim=1) - frames.mean(dim=1) ** 2)  # fails
    return (spread - target).square().mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
