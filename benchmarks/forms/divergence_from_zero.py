"""A divergence whose first distribution holds zeros: 0 times log 0.

https://github.com/Lightning-AI/torchmetrics/issues/1029
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
    x = torch.randn(16, 8, generator=draw)
    p = torch.softmax(3 * x[:, :4], dim=-1)
    if bad:
        p[1] = torch.tensor([0.5, 0.5, 0.0, 0.0])
    return x, p


def objective(x, p):
    q = torch.softmax(net(x), dim=-1)
    return (p * torch.log(p / q)).sum(dim=-1).mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
