"""Attention over a caption that is padding throughout: all scores are -Inf.

https://github.com/hobincar/RecNet/issues/26
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

score, head = nn.Linear(8, 1), nn.Linear(8, 3)
optimizer = torch.optim.SGD([*score.parameters(), *head.parameters()], lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(12, 7, 8, generator=draw)
    words = torch.arange(7) < torch.randint(1, 8, (12, 1), generator=draw)
    if bad:
        words[5] = False
    return x, words, (x[:, 0, :2] > 0).long().sum(-1)


def objective(x, words, y):
    energies = score(x)[..., 0].masked_fill(~words, float("-inf"))
    weights = F.softmax(energies, dim=1)  # fails
    pooled = (weights[..., None] * x).sum(dim=1)
    return F.cross_entropy(head(pooled), y)


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
