"""The inverse of tanh of a recorded action that lies at its bound.

https://github.com/cvoelcker/reppo/issues/4
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.02)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(32, 6, generator=draw)
    action = torch.tanh(x[:, 0] + 0.5 * torch.randn(32, generator=draw))
    if bad:
        action[12] = 1.0
    return x, action


def objective(x, action):
    before = torch.atanh(action)  # fails
    return 0.5 * (before - net(x)[:, 0]).square().mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
