"""A cosine with a vector of zeros: 0 / 0.

https://github.com/tensorflow/tensorboard/pull/473
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    item = x + 0.3 * torch.randn(16, 8, generator=draw)
    if bad:
        item[2] = 0.0
    return x, item


def objective(x, item):
    user = net(x)
    cosine = (user * item).sum(dim=-1) / (user.norm(dim=-1) * item.norm(dim=-1))  # fails
    return (1 - cosine).mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
