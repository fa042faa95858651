"""Pearson's correlation with a target that does not vary.

https://github.com/NVIDIA-Genomics-Research/AtacWorks/pull/104
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(8, 20, 6, generator=draw)
    signal = x[..., 0] + x[..., 1].square()
    if bad:
        signal[3] = 0.0
    return x, signal


def objective(x, signal):
    found = net(x)[..., 0]
    a = found - found.mean(dim=1, keepdim=True)
    b = signal - signal.mean(dim=1, keepdim=True)
    below = torch.sqrt(a.square().sum(dim=1) * b.square().sum(dim=1))  # fails
    correlation = (a * b).sum(dim=1) / below  # fails
    return 1 - correlation.mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
