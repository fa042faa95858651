"""The entropy of a policy with a move that is ruled out: 0 times log 0.

https://github.com/tensorflow/probability/issues/241
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    prior = torch.zeros(16, 3)
    if bad:
        prior[3, y[3]] = -200.0
    return x, y, prior


def objective(x, y, prior):
    p = torch.softmax(net(x) + prior, dim=-1)
    entropy = -(p * torch.log(p)).sum(dim=-1)  # fails
    return nn.functional.cross_entropy(net(x), y) - 0.05 * entropy.mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
