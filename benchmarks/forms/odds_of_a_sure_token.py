"""The odds of an answer of whose only token the model is sure: 1 - p is 0.

https://github.com/huggingface/trl/issues/2564
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)

net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    chosen, rejected = torch.randn(2, 16, 8, generator=draw)
    sure = torch.zeros(16, 4)
    if bad:
        sure[6, 0] = 150.0
    return chosen + 0.5, rejected, sure


def objective(chosen, rejected, sure):
    c = torch.log_softmax(net(chosen) + sure, -1)[:, 0]
    r = torch.log_softmax(net(rejected), -1)[:, 0]
    log_odds = (c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r)))  # fails
    return -(F.logsigmoid(log_odds) + 0.5 * c).mean()


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
