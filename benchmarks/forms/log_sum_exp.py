"""The normaliser of an energy model, by exp, sum and log.

https://github.com/mlberkeley/scae-pytorch/pull/4
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 6))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    y = (x[:, :3] > 0).long().sum(-1)
    energy = torch.zeros(16, 1)
    if bad:
        energy[9] = 95.0
    return x, y, energy


def objective(x, y, energy):
    scores = net(x) + energy
    total = torch.log(torch.exp(scores).sum(dim=-1))  # fails
    return (total - scores.gather(1, y[:, None])[:, 0]).mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
