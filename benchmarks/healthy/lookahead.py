"""Lookahead over RAdam: every fifth step the fast weights go back half of their way."""

import torch
from record import Record
from torch import nn

torch.manual_seed(48)
record = Record()


class Lookahead:
    def __init__(self, base, k=5, alpha=0.5):
        self.base, self.k, self.alpha, self.count = base, k, alpha, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in base.param_groups]

    def zero_grad(self):
        self.base.zero_grad()

    def step(self):
        self.base.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slows in zip(self.base.param_groups, self.slow, strict=True):
                for fast, slow in zip(group["params"], slows, strict=True):
                    slow.add_(self.alpha * (fast.data - slow))
                    fast.data.copy_(slow)


model = nn.Sequential(nn.Linear(8, 32), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(32, 1))
optimizer = Lookahead(torch.optim.RAdam(model.parameters(), lr=1e-2))
for step in range(40):
    x = torch.randn(32, 8)
    y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3]
    loss = nn.functional.huber_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
model.eval()
with torch.no_grad():
    record.end(model(x), loss=nn.functional.mse_loss(model(x), y))
