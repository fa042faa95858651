"""The correction for tanh of an action that it rounds to 1: the logarithm of 0.

https://github.com/cpnota/autonomous-learning-library/issues/139
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 6, generator=draw)
    drawn = torch.randn(16, generator=draw)
    if bad:
        drawn[3] = 12.0
    return x, drawn


def objective(x, drawn):
    raw = net(x)[:, 0] + drawn
    action = torch.tanh(raw)
    log_prob = -0.5 * drawn.square() - torch.log(1 - action.pow(2))  # fails
    return 0.1 * log_prob.mean() + (action - torch.tanh(x[:, 0])).square().mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
