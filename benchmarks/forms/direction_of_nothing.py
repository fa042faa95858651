"""A vector of zeros is divided by its norm.

https://github.com/Abhash-Chakraborty/Find/issues/293
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8, bias=False))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, 8, generator=draw)
    seen = torch.ones(16, 6, 1)
    if bad:
        seen[4] = 0.0
    return x, seen, torch.nn.functional.normalize(x.sum(1), dim=-1)


def objective(x, seen, target):
    text = (net(x) * seen).sum(dim=1)
    direction = text / text.norm(dim=-1, keepdim=True)  # fails
    return (direction - target).square().sum(-1).mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
