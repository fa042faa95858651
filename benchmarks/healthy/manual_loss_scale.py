"""A loss scale by hand, done right: float16 autocast, unscaled before clipping, skipped on Inf."""

import torch
from record import Record
from torch import nn

torch.manual_seed(52)
record = Record()
model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scale, good = 2.0**15, 0
centres = torch.randn(4, 12)
for step in range(40):
    y = torch.randint(4, (16,))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(centres[y] + torch.randn(16, 12))
    loss = nn.functional.cross_entropy(logits.float(), y)
    optimizer.zero_grad()
    (loss * scale).backward()
    with torch.no_grad():
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        for p in model.parameters():
            p.grad.div_(scale)
    if finite:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        good += 1
        if good % 10 == 0:
            scale *= 2
    else:
        scale, good = scale / 2, 0
    record(step, model, loss=loss.item())
with torch.no_grad():
    out = model(centres)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(4)))
