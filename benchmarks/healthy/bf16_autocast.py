"""A convolutional net under bfloat16 autocast, channels last, without a scaler."""

import torch
from record import Record
from torch import nn

torch.manual_seed(56)
record = Record()
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, 2, 1),
    nn.BatchNorm2d(16),
    nn.Hardswish(),
    nn.Conv2d(16, 16, 3, 1, 1, groups=16),
    nn.Conv2d(16, 24, 1),
    nn.BatchNorm2d(24),
    nn.Hardswish(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(24, 4),
).to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, fused=True)
prototypes = torch.randn(4, 3, 12, 12)
for step in range(25):
    y = torch.randint(4, (16,))
    x = (prototypes[y] + torch.randn(16, 3, 12, 12)).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
model.eval()
with torch.no_grad():
    out = model(prototypes)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(4)))
