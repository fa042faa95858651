"""Gradient noise that is annealed, added to .grad between backward and step."""

import torch
from record import Record
from torch import nn

torch.manual_seed(49)
record = Record()
layers = []
for i in range(6):
    layers += [nn.Linear(10 if i == 0 else 20, 20), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(20, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
centres = torch.randn(3, 10) * 1.5
for t in range(40):
    y = torch.randint(3, (32,))
    loss = nn.functional.cross_entropy(model(centres[y] + torch.randn(32, 10)), y)
    optimizer.zero_grad()
    loss.backward()
    std = (0.01 / (1 + t) ** 0.55) ** 0.5
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=std)
    optimizer.step()
    record(t, model, loss=loss.item())
with torch.no_grad():
    out = model(centres)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(3)))
