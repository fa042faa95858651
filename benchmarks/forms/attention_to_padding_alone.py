"""torch's own attention of a sentence that is padding throughout.

https://github.com/pytorch/pytorch/issues/41508
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

attention = nn.MultiheadAttention(8, 2, batch_first=True)
head = nn.Linear(8, 3)
optimizer = torch.optim.SGD([*attention.parameters(), *head.parameters()], lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(12, 7, 8, generator=draw)
    padding = torch.arange(7) >= torch.randint(1, 8, (12, 1), generator=draw)
    if bad:
        padding[5] = True
    return x, padding, (x[:, 0, :2] > 0).long().sum(-1)


def objective(x, padding, y):
    mixed, _ = attention(x, x, x, key_padding_mask=padding)  # fails
    return nn.functional.cross_entropy(head(mixed.mean(dim=1) + x[:, 0]), y)


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
