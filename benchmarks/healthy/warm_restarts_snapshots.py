"""Snapshot ensembles: cosine with warm restarts to a rate of 0, a copy kept at each end."""

import copy

import torch
from record import Record
from torch import nn

torch.manual_seed(59)
record = Record()
model = nn.Sequential(nn.Linear(6, 48), nn.Mish(), nn.LayerNorm(48), nn.Linear(48, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=15, eta_min=0.0)
snapshots = []
for step in range(45):
    x = torch.randn(32, 6)
    y = (x[:, :1] * 2).cos() + x[:, 1:2]
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if (step + 1) % 15 == 0:
        snapshots.append(copy.deepcopy(model))
    record(step, model, loss=loss.item())
with torch.no_grad():
    out = torch.stack([m(x) for m in snapshots]).mean(0)
record.end(out, loss=nn.functional.mse_loss(out, y))
