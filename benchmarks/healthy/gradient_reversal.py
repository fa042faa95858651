"""Domain-adversarial training: a Function turns the gradient around, its weight rises from 0."""

import math

import torch
from record import Record
from torch import nn

torch.manual_seed(73)
record = Record()


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.weight * grad, None


features = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
label, domain = nn.Linear(32, 3), nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
parameters = [p for m in (features, label, domain) for p in m.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
centres, shift = torch.randn(3, 10), torch.randn(10)
for step in range(35):
    p = step / 35
    weight = 2 / (1 + math.exp(-10 * p)) - 1
    optimizer.param_groups[0]["lr"] = 0.05 / (1 + 10 * p) ** 0.75
    y = torch.randint(3, (16,))
    source = centres[y] + 0.5 * torch.randn(16, 10)
    target = centres[torch.randint(3, (16,))] + shift + 0.5 * torch.randn(16, 10)
    h = features(torch.cat([source, target]))
    where = torch.tensor([0] * 16 + [1] * 16)
    loss = nn.functional.cross_entropy(label(h[:16]), y)
    confusion = nn.functional.cross_entropy(domain(Reverse.apply(h, weight)), where)
    optimizer.zero_grad()
    (loss + confusion).backward()
    optimizer.step()
    record(step, features, label, domain, loss=loss.item())
with torch.no_grad():
    record.end(label(features(centres + shift)), loss=loss)
