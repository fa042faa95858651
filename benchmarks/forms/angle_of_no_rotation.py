"""The angle of a rotation that turns nothing: the slope of acos at 1 is infinite.

https://github.com/banctilrobitaille/torch-vectorized/issues/7
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=draw)
    moves = torch.ones(16)
    if bad:
        moves[10] = 0.0
    return x, moves, x[:, 0].sigmoid()


def objective(x, moves, target):
    turn = (0.5 + net(x)[:, 0].sigmoid()) * moves
    trace = 1 + 2 * torch.cos(turn)
    angle = torch.acos((trace - 1) / 2)  # fails
    return (angle - target).square().mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
