"""A class that its prior rules out is the right one: its probability is 0 in float32.

https://github.com/rasbt/deep-learning-book/pull/70
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
    probabilities = torch.softmax(net(x) + prior, dim=-1)
    return -torch.log(probabilities[torch.arange(16), y]).mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
