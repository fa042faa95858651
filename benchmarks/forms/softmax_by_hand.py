"""Attention whose softmax is an exponential over the sum of exponentials.

https://github.com/uTensor/uTensor/issues/175
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

query, key, value = (nn.Linear(8, 8) for _ in range(3))
head = nn.Linear(8, 1)
parts = nn.ModuleList([query, key, value, head])
optimizer = torch.optim.SGD(parts.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 5, 8, generator=draw)
    bias = torch.zeros(8, 1, 5)
    if bad:
        bias[2, 0, 1] = 100.0
    return x, x.mean(dim=1)[:, 0], bias


def objective(x, y, bias):
    scores = query(x) @ key(x).transpose(1, 2) / 8**0.5 + bias
    attention = torch.exp(scores) / torch.exp(scores).sum(dim=-1, keepdim=True)  # fails
    pooled = (attention @ value(x)).mean(dim=1)
    return (head(pooled)[:, 0] - y).square().mean() + 0.1


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
