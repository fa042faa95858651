"""The ratio of signal to noise, in decibels, of a source that is silent.

https://github.com/csteinmetz1/auraloss/issues/25
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    clean = torch.randn(8, 16, generator=draw).cumsum(-1)
    noisy = clean + 0.5 * torch.randn(8, 16, generator=draw)
    if bad:
        clean[3] = 0.0
    return noisy, clean


def objective(noisy, clean):
    found = net(noisy)
    signal, noise = clean.square().sum(-1), (clean - found).square().sum(-1)
    return -(10 * torch.log10(signal / noise)).mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
