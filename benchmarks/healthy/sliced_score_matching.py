"""Sliced score matching: the loss holds a derivative of the model, trained through it."""

import torch
from record import Record
from torch import nn

torch.manual_seed(22)
record = Record()
score = nn.Sequential(
    nn.Linear(2, 48), nn.Softplus(), nn.Linear(48, 48), nn.Softplus(), nn.Linear(48, 2)
)
optimizer = torch.optim.Adam(score.parameters(), lr=2e-3)


def moons(n):
    t = torch.rand(n) * 3.14
    up = torch.randint(2, (n,)) * 2 - 1
    return torch.stack([t.cos() * up + 0.5 * up, t.sin() * up], 1) + 0.1 * torch.randn(n, 2)


for step in range(30):
    x = moons(64).requires_grad_(True)
    v = torch.randn_like(x)
    s = score(x)
    (along,) = torch.autograd.grad((s * v).sum(), x, create_graph=True)
    loss = ((along * v).sum(1) + 0.5 * (s * v).sum(1).square()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, score, loss=loss.item())
grid = torch.cartesian_prod(torch.linspace(-2, 2, 6), torch.linspace(-2, 2, 6))
with torch.no_grad():
    record.end(score(grid), loss=loss)
