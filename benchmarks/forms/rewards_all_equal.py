"""Rewards of a group are divided by their deviation, and all are the same.

https://github.com/modelscope/ms-swift/issues/5571
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
    x = torch.randn(6, 8, generator=draw)
    rewards = torch.randn(6, 4, generator=draw)
    rewards[:, 0] += x[:, 0]
    if bad:
        rewards[3] = 1.0
    return x, rewards


def objective(x, rewards):
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    advantage = centred / rewards.std(dim=1, keepdim=True)  # fails
    policy = torch.log_softmax(net(x), -1)
    return -(policy * advantage[:, :3]).sum(-1).mean() + 1.0


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
