"""GradScaler with accumulation over four micro-batches, unscale once, clip, a short last window."""

import torch
from record import Record
from torch import nn

torch.manual_seed(53)
record = Record()
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
centres, total, window, update = torch.randn(3, 16), 42, 4, 0
for i in range(total):
    y = torch.randint(3, (8,))
    size = window if i < total - total % window else total % window
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(centres[y] + torch.randn(8, 16)), y) / size
    scaler.scale(loss).backward()
    if (i + 1) % window == 0 or i + 1 == total:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        record(update, model, loss=loss.item() * size)
        update += 1
model.eval()
with torch.no_grad():
    out = model(centres)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(3)))
