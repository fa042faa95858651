"""The likelihood of a sequence as a product of the likelihoods of its tokens.

https://github.com/githubharald/CTCWordBeamSearch/issues/23
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
    x = torch.randn(6, 20, 8, generator=draw)
    y = (x[..., :4] > 0).long().sum(-1)
    rare = torch.zeros(6, 20, 5)
    if bad:
        rare[2] = -6.0 * nn.functional.one_hot(y[2], 5)
    return x, y, rare


def objective(x, y, rare):
    p = torch.softmax(net(x) + rare, dim=-1)
    path = p.gather(2, y[..., None])[..., 0].prod(dim=-1)  # fails
    return -torch.log(path).mean() / 20  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
