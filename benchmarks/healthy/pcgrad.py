"""PCGrad: the gradients of two tasks are projected off each other and written into .grad."""

import random

import torch
from record import Record
from torch import nn

torch.manual_seed(50)
record = Record()
body = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
heads = nn.ModuleList([nn.Linear(16, 1), nn.Linear(16, 1)])
shared, params = list(body.parameters()), [*body.parameters(), *heads.parameters()]
optimizer = torch.optim.Adam(params, lr=5e-3)
for step in range(30):
    x = torch.randn(32, 10)
    h = body(x)
    losses = [
        (heads[0](h) - x[:, :1].sin()).square().mean(),
        (heads[1](h) + 2 * x[:, :1] - x[:, 1:2]).square().mean(),
    ]
    optimizer.zero_grad()
    grads = []
    for loss in losses:
        loss.backward(retain_graph=True)
        grads.append(torch.cat([p.grad.flatten() for p in shared]))
        for p in shared:
            p.grad = None
    projected = [g.clone() for g in grads]
    for i, g in enumerate(projected):
        for j in random.sample(range(2), 2):
            dot = g @ grads[j]
            if i != j and dot < 0:
                g -= dot / grads[j].square().sum() * grads[j]
    merged = sum(projected)
    for p, part in zip(shared, merged.split([p.numel() for p in shared]), strict=True):
        p.grad = part.view_as(p).clone()
    optimizer.step()
    record(step, body, heads, loss=sum(losses).item())
with torch.no_grad():
    record.end(body(x), loss=sum(losses))
