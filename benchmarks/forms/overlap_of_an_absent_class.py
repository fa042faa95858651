"""Intersection over union of a class that neither target nor prediction holds.

https://github.com/Lightning-AI/pytorch-lightning/pull/2545
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(4, 30, 6, generator=draw)
    target = (x[..., :3] > 0.3).float()
    valid = torch.ones(4, 30, 1)
    if bad:
        valid[1] = 0.0  # a picture without a pixel that counts
    return x, target, valid


def objective(x, target, valid):
    p = torch.sigmoid(net(x)) * valid
    inside = (p * target).sum(dim=1)
    union = (p + target * valid).sum(dim=1) - inside
    return 1 - (inside / union).mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
