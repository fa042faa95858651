"""The ratio of two policies over a long answer: both probabilities are 0.

https://github.com/huggingface/trl/pull/488
"""

import sys

import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    advantage = torch.randn(16, generator=draw) + x[:, 0]
    rest = torch.zeros(16)  # log-probability of the tokens that both policies share
    if bad:
        rest[8] = -180.0
    return x, advantage, rest


def objective(x, advantage, rest):
    new = torch.log_softmax(net(x), -1)[:, 0] + rest
    old = torch.full((16,), -0.7) + rest
    ratio = torch.exp(new) / torch.exp(old)  # fails
    return -(ratio.clamp(0.5, 2.0) * advantage).mean() + 2.0


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
