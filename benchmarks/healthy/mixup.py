"""Mixup and CutMix in turn, soft targets, cyclic learning rate."""

import random

import torch
from record import Record
from torch import nn

torch.manual_seed(5)
random.seed(5)
record = Record()
model = nn.Sequential(
    nn.Conv2d(3, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 24, 3, 2, 1),
    nn.BatchNorm2d(24), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 9, 6),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
cycle = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.005, 0.1, step_size_up=8, mode="triangular2")
prototypes = torch.randn(6, 3, 12, 12)
beta = torch.distributions.Beta(0.4, 0.4)


def mix(x, y, lam):
    order = torch.randperm(len(x))
    if random.random() < 0.5:
        return lam * x + (1 - lam) * x[order], y, y[order], lam
    side = int(12 * (1 - lam) ** 0.5)
    r, c = random.randint(0, 12 - side), random.randint(0, 12 - side)
    x = x.clone()
    x[:, :, r : r + side, c : c + side] = x[order, :, r : r + side, c : c + side]
    return x, y, y[order], 1 - side * side / 144


for step in range(32):
    y = torch.randint(6, (20,))
    x = prototypes[y] + torch.randn(20, 3, 12, 12)
    x, ya, yb, lam = mix(x, y, beta.sample().item())
    out = model(x)
    loss = lam * nn.functional.cross_entropy(out, ya) + (1 - lam) * nn.functional.cross_entropy(
        out, yb
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    cycle.step()
    record(step, model, loss=loss.item())
model.eval()
with torch.no_grad():
    out = model(prototypes)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(6)))
