"""Gradient checkpointing by hand, with dropout inside the recomputed part."""

import torch
from record import Record
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

torch.manual_seed(74)
record = Record()
blocks = nn.Sequential(
    *(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
)
head = nn.Linear(16, 3)
optimizer = torch.optim.AdamW([*blocks.parameters(), *head.parameters()], lr=5e-3)
centres = torch.randn(3, 16) * 2
for step in range(25):
    y = torch.randint(3, (16,))
    x = centres[y] + torch.randn(16, 16)
    if step % 2:
        h = checkpoint_sequential(blocks, 3, x, use_reentrant=False)
    else:
        h = x
        for block in blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
    loss = nn.functional.cross_entropy(head(h), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, blocks, head, loss=loss.item())
with torch.no_grad():
    record.end(head(blocks.eval()(centres)), loss=loss)
