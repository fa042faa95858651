"""ULMFiT: one more layer is thawed every few steps; the optimizer holds all from the start."""

import torch
from record import Record
from torch import nn

torch.manual_seed(58)
record = Record()
model = nn.Sequential(
    nn.Linear(12, 32),
    nn.ReLU(),
    nn.Linear(32, 32),
    nn.ReLU(),
    nn.Linear(32, 32),
    nn.ReLU(),
    nn.Linear(32, 4),
)
linears = [m for m in model if isinstance(m, nn.Linear)]
for layer in linears[:-1]:
    layer.requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
centres = torch.randn(4, 12)
for step in range(40):
    if step % 10 == 0 and step:
        linears[-1 - step // 10].requires_grad_(True)
    y = torch.randint(4, (24,))
    loss = nn.functional.cross_entropy(model(centres[y] + torch.randn(24, 12)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
with torch.no_grad():
    out = model(centres)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(4)))
