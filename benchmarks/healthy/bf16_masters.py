"""bfloat16 weights with float32 masters by hand, as fairseq and apex did it."""

import torch
from record import Record
from torch import nn

torch.manual_seed(54)
record = Record()
model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 2))
model.to(torch.bfloat16)
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=2e-3)
for step in range(40):
    x = torch.randn(32, 10)
    y = (x[:, 0] > x[:, 1]).long()
    loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
    model.zero_grad()
    loss.backward()
    for master, p in zip(masters, model.parameters(), strict=True):
        master.grad = p.grad.float()
    nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters(), strict=True):
            p.copy_(master)
    record(step, model, loss=loss.item())
with torch.no_grad():
    record.end(model(x.bfloat16()), loss=loss)
