"""Contrast of pairs: exponentials of similarities that float32 does not hold.

https://github.com/amazon-science/sccl/issues/27
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
    noise = 0.1 * torch.randn(12, 8, generator=draw)
    hub = torch.zeros(12, 1)
    if bad:
        hub[4] = 92.0
    return x, x + noise, hub


def objective(first, second, hub):
    a = nn.functional.normalize(net(first), dim=-1)
    b = nn.functional.normalize(net(second), dim=-1)
    similar = a @ b.t() / 0.1 + hub
    together = torch.exp(similar.diagonal())  # fails
    everyone = torch.exp(similar).sum(dim=-1)  # fails
    return -torch.log(together / everyone).mean()  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
