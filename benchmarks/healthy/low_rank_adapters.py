"""Adapters only: a frozen net, low-rank matrices of which one begins at 0."""

import torch
from record import Record
from torch import nn

torch.manual_seed(71)
record = Record()


class LoRA(nn.Module):
    def __init__(self, base, r=4, alpha=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(r, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


base = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
for name in ("0", "2"):
    setattr(base, name, LoRA(getattr(base, name)))
base[4].requires_grad_(False)
optimizer = torch.optim.AdamW([p for p in base.parameters() if p.requires_grad], lr=1e-2)
centres = torch.randn(4, 12)
for step in range(30):
    y = torch.randint(4, (24,))
    loss = nn.functional.cross_entropy(base(centres[y] + torch.randn(24, 12)), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    record(step, base, loss=loss.item())
with torch.no_grad():
    out = base(centres)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(4)))
