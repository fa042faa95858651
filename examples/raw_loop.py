"""A loop of one's own: `nanstop run raw_loop.py`. It has no line of nanstop."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
teacher = torch.randn(16, 4)

for step in range(40):
    x = torch.randn(32, 16)
    loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.3f}")
