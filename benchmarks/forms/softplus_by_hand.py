"""A softplus written out, of a number beyond the logarithm of the largest float32.

https://github.com/tracel-ai/burn/issues/5373
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    margin = torch.ones(16)
    if bad:
        margin[2] = 100.0
    return x, torch.sign(x[:, 0]), margin


def objective(x, sign, margin):
    wrong = margin - sign * net(x)[:, 0]
    return torch.log(1 + torch.exp(wrong)).mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
