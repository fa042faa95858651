"""Scores are scaled to 0..1 in float16, which rounds an eps of 1e-8 to 0.

https://github.com/lightonai/pylate/issues/239
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    teacher = 10 * torch.rand(16, 5, generator=draw).half()
    teacher[:, 0] += (5 * x[:, 0].sigmoid()).half()
    if bad:
        teacher[2] = 4.0
    return x, teacher


def objective(x, teacher):
    low, high = teacher.amin(-1, keepdim=True), teacher.amax(-1, keepdim=True)
    scaled = (teacher - low) / (high - low + 1e-8)  # fails
    return (torch.sigmoid(net(x)) - scaled.float()).square().mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
