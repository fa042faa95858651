"""Advantages are divided by the deviation of the last batch, which has one row.

https://github.com/DLR-RM/stable-baselines3/issues/440
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
    x = torch.randn(1 if bad else 16, 8, generator=draw)
    action = torch.randn(len(x), generator=draw)
    return x, action, x[:, 0] * action + torch.randn(len(x), generator=draw)


def objective(x, action, gain):
    advantage = (gain - gain.mean()) / (gain.std() + 1e-8)  # fails
    surprise = 0.5 * (action - net(x)[:, 0]).square()
    return (surprise * (1 + 0.2 * advantage)).mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
