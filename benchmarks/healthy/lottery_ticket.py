"""Lottery tickets: small weights are set to 0 after each round, the others back to their start."""

import copy

import torch
from record import Record
from torch import nn

torch.manual_seed(83)
record = Record()
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
start = copy.deepcopy(model.state_dict())
masks = {n: torch.ones_like(p) for n, p in model.named_parameters() if p.ndim == 2}
centres, step = torch.randn(4, 16), 0
for level in range(3):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(15):
        y = torch.randint(4, (24,))
        loss = nn.functional.cross_entropy(model(centres[y] + torch.randn(24, 16)), y)
        optimizer.zero_grad()
        loss.backward()
        for n, p in model.named_parameters():
            if n in masks:
                p.grad.mul_(masks[n])
        optimizer.step()
        record(step, model, loss=loss.item())
        step += 1
    for n, p in model.named_parameters():
        if n in masks:
            alive = p.detach().abs()[masks[n].bool()]
            masks[n] *= (p.detach().abs() > alive.quantile(0.4)).float()
    model.load_state_dict(start)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if n in masks:
                p.mul_(masks[n])
with torch.no_grad():
    out = model(centres)
record.end(out, loss=loss)
