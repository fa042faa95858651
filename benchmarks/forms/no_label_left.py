"""Cross-entropy of a batch from which truncation has taken every label.

https://github.com/huggingface/trl/issues/6668
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

embed, head = nn.Embedding(20, 16), nn.Linear(16, 20)
optimizer = torch.optim.SGD([*embed.parameters(), *head.parameters()], lr=0.1)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 20, (4, 12), generator=draw)
    labels = (tokens + 1) % 20
    labels[:, :3] = -100
    if bad:
        labels[:] = -100
    return tokens, labels


def objective(tokens, labels):
    logits = head(embed(tokens))
    return F.cross_entropy(logits.view(-1, 20), labels.view(-1))  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
