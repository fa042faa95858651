"""Supervised contrast: an anchor of whose class there is no other row.

https://github.com/HobbitLong/SupContrast/issues/141
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(12, 8, generator=draw)
    label = torch.arange(12) % 3
    x[:, 0] += label
    if bad:
        label[6] = 7
    return x, label


def objective(x, label):
    features = nn.functional.normalize(net(x), dim=-1)
    apart = 1 - torch.eye(12)
    mask = (label[:, None] == label).float() * apart
    similar = features @ features.t() / 0.5
    log_prob = similar - torch.log((torch.exp(similar) * apart).sum(1, keepdim=True))
    mean_log_prob = (mask * log_prob).sum(1) / mask.sum(1)  # fails
    return -mean_log_prob.mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
