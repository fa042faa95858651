"""A point that lies far from every component of a mixture: its density is 0.

https://github.com/tonyduan/mixture-density-network/pull/4
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 9))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(32, 4, generator=draw)
    y = x[:, 0] + 0.3 * torch.randn(32, generator=draw)
    if bad:
        y[11] = 30.0
    return x, y


def objective(x, y):
    weight, mean, spread = net(x).chunk(3, dim=-1)
    weight = torch.softmax(weight, dim=-1)
    sigma = 1 + nn.functional.softplus(spread)
    density = torch.exp(-0.5 * ((y[:, None] - mean) / sigma) ** 2) / (2.5066 * sigma)
    return -torch.log((weight * density).sum(dim=-1)).mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
