"""The Dice score of a large picture in float16: the sum of its pixels is Inf.

https://github.com/qubvel-org/segmentation_models.pytorch/issues/463
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
    x = torch.randn(2, 200, 6, generator=draw)
    target = (x[..., 0] > -1).float()
    times = 600 if bad else 1  # one large picture
    return x, target, times


def objective(x, target, times):
    p, t = torch.sigmoid(net(x)[..., 0]).half(), target.half()
    inside = (p * t * times).sum()  # fails
    whole = (p * times).sum() + (t * times).sum()  # fails
    return 1 - (2 * inside / whole).float()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
