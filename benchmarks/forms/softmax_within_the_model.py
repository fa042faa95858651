"""The model ends in a softmax, and the loss takes the logarithm.

https://github.com/clvrai/ACGAN-PyTorch/pull/4
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 32)
        self.out = nn.Linear(32, 3)

    def forward(self, x, prior):
        scores = self.out(torch.tanh(self.hidden(x))) + prior
        return torch.softmax(scores, dim=-1)


model = Classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)


def batch(step, *, bad=False):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(16, 8, generator=draw)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    prior = torch.zeros(16, 3)
    if bad:
        prior[3, y[3]] = -200.0
    return x, y, prior


def objective(x, y, prior):
    return F.nll_loss(torch.log(model(x, prior)), y)  # fails


for step in range(60):
    loss = objective(*batch(step, bad=BAD and step == 20))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.4f}")
with torch.no_grad():
    print(f"final_loss={objective(*batch(1000)).item():.6f}")
