"""Two masks of the lowest number are added: -Inf, and a row that sees nothing.

https://github.com/huggingface/transformers/pull/27114
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

query, key, value = (nn.Linear(8, 8) for _ in range(3))
head = nn.Linear(8, 3)
optimizer = torch.optim.SGD(nn.ModuleList([query, key, value, head]).parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 5, 8, generator=draw)
    padding = torch.zeros(8, 1, 5)
    padding[::2, 0, 4] = torch.finfo(torch.float32).min
    if bad:
        padding[3] = torch.finfo(torch.float32).min
    return x, padding, (x[:, 0, :2] > 0).long().sum(-1)


def objective(x, padding, y):
    lowest = torch.finfo(torch.float32).min
    later = torch.full((5, 5), lowest).triu(1)
    own = torch.eye(5) * lowest  # a token does not look at itself
    scores = query(x) @ key(x).transpose(1, 2) + padding + (later + own)  # fails
    mixed = torch.softmax(scores, dim=-1) @ value(x)  # fails
    return F.cross_entropy(head(mixed.mean(dim=1) + x[:, 0]), y)


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
