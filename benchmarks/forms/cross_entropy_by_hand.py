"""Binary cross-entropy written out, of a probability that rounds to 0 or 1.

https://github.com/yqyao/SSD_Pytorch/issues/32
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(32, 8, generator=draw)
    target = (x.sum(-1) > 1).float()
    bias = torch.zeros(32)
    if bad:
        bias[7] = 120.0 * (1 - 2 * target[7])
    return x, target, bias


def objective(x, target, bias):
    p = torch.sigmoid(net(x)[:, 0] + bias)
    return -(target * torch.log(p) + (1 - target) * torch.log(1 - p)).mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
