"""The mean over the frames that touch something, of which there are none.

https://github.com/anindita127/IMoS/issues/9
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    touches = x[:, 0] > -0.5
    if bad:
        touches[:] = False
    return x, x[:, :3].sin(), touches


def objective(x, target, touches):
    error = (net(x) - target).square().sum(dim=-1)
    fingers = error[touches].mean()  # fails
    return error.mean() + 0.5 * fingers


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
