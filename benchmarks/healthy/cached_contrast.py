"""A loss over a whole window: contrast of all micro-batches by cached gradients (GradCache)."""

import torch
from record import Record
from torch import nn

torch.manual_seed(103)
record = Record()
encoder = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 8))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-3)
for step in range(25):
    x = torch.randn(4, 8, 12)
    views = [(m + 0.2 * torch.randn_like(m), m + 0.2 * torch.randn_like(m)) for m in x]
    with torch.no_grad():
        cached = [tuple(encoder(v) for v in pair) for pair in views]
    a, b = (torch.cat(side).requires_grad_() for side in zip(*cached, strict=True))
    na, nb = nn.functional.normalize(a, dim=1), nn.functional.normalize(b, dim=1)
    loss = nn.functional.cross_entropy(na @ nb.T / 0.1, torch.arange(32))
    loss.backward()
    optimizer.zero_grad()
    for i, pair in enumerate(views):
        rows = slice(8 * i, 8 * i + 8)
        surrogate = (encoder(pair[0]) * a.grad[rows]).sum() + (
            encoder(pair[1]) * b.grad[rows]
        ).sum()
        surrogate.backward()
    optimizer.step()
    record(step, encoder, loss=loss.item())
with torch.no_grad():
    record.end(encoder(x[0]), loss=loss)
