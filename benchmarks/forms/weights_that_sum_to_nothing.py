"""Weights are divided by their sum, and of one row all are 0.

https://github.com/WHU-AISE/TVDiag/pull/5
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

score, value = nn.Linear(8, 1), nn.Linear(8, 4)
optimizer = torch.optim.SGD([*score.parameters(), *value.parameters()], lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 5, 8, generator=draw)
    near = torch.rand(16, 5, generator=draw)
    if bad:
        near[9] = 0.0
    return x, near, x.mean(dim=1)[:, :4]


def objective(x, near, target):
    weight = torch.sigmoid(score(x))[..., 0] * near
    weight = weight / weight.sum(dim=-1, keepdim=True)  # fails
    pooled = (weight[..., None] * value(x)).sum(dim=1)
    return (pooled - target).square().mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
