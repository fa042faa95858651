"""A mean over the tokens of answers, all of which were cut off and masked.

https://github.com/huggingface/trl/pull/3248
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(4, 10, 8, generator=draw)
    mask = (torch.rand(4, 10, generator=draw) > 0.3).float()
    if bad:
        mask.zero_()
    return x, (x[..., :3] > 0).long().sum(-1), mask


def objective(x, y, mask):
    per_token = nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="none")
    return (per_token.view(4, 10) * mask).sum() / mask.sum()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
