"""A zero vector is normalised in float16, which rounds eps = 1e-12 to 0.

https://github.com/pytorch/pytorch/issues/32137
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    seen = torch.ones(16, 1)
    if bad:
        seen[9] = 0.0
    return x, seen


def objective(x, seen):
    features = (net(x) * seen).half()
    unit = F.normalize(features, dim=-1)  # fails
    return (unit.float() - F.normalize(x, dim=-1)).square().sum(-1).mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
