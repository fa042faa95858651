"""A loop with a guard of its own: a batch whose loss is far above the mean is not learned from."""

import torch
from record import Record
from torch import nn

torch.manual_seed(100)
record = Record()
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
mean, skipped = None, 0
for step in range(40):
    x = torch.randn(16, 8)
    y = x[:, :1] + 0.1 * torch.randn(16, 1)
    if step in (13, 27):
        y = y * 1000  # a broken sensor
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    if mean is not None and loss.item() > 20 * mean:
        skipped += 1
    else:
        loss.backward()
        optimizer.step()
        mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
    record(step, model, loss=loss.item())
print(f"{skipped} batches skipped")
with torch.no_grad():
    record.end(model(x), loss=nn.functional.mse_loss(model(x), y))
