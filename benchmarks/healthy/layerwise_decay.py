"""Fine-tuning with a rate for each layer: the first ones a hundredth of the last."""

import torch
from record import Record
from torch import nn

torch.manual_seed(51)
record = Record()
layers = nn.ModuleList(
    nn.TransformerEncoderLayer(24, 3, 48, dropout=0.0, batch_first=True) for _ in range(4)
)
embed, head = nn.Embedding(50, 24), nn.Linear(24, 2)
groups = [{"params": embed.parameters(), "lr": 1e-5}]
groups += [
    {"params": layer.parameters(), "lr": 3e-3 * 0.3 ** (3 - i)} for i, layer in enumerate(layers)
]
groups += [{"params": head.parameters(), "lr": 1e-2}]
optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [
        torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=5),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    ],
    milestones=[5],
)
for step in range(25):
    ids = torch.randint(50, (12, 9))
    y = (ids < 25).sum(1).gt(4).long()
    h = embed(ids)
    for layer in layers:
        h = layer(h)
    loss = nn.functional.cross_entropy(head(h.mean(1)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    record(step, embed, layers, head, loss=loss.item())
record.end(h, loss=loss)
