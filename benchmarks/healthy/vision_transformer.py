"""A small ViT: class token, position table of zeros, AdamW without decay of vectors, clipping."""

import torch
from record import Record
from torch import nn

torch.manual_seed(3)
record = Record()


class ViT(nn.Module):
    def __init__(self, dim=32, depth=2, patches=16, classes=4):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.zeros(1, patches + 1, dim))
        nn.init.trunc_normal_(self.pos, std=0.02)
        layer = nn.TransformerEncoderLayer(
            dim, 4, 2 * dim, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.blocks(x)[:, 0]))


model = ViT()
decay = [p for p in model.parameters() if p.ndim >= 2]
rest = [p for p in model.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=2e-3
)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=30)
images = torch.randn(4, 3, 16, 16)
for step in range(30):
    y = torch.randint(4, (12,))
    loss = nn.functional.cross_entropy(model(images[y] + 0.7 * torch.randn(12, 3, 16, 16)), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    record(step, model, loss=loss.item())
model.eval()
with torch.no_grad():
    output = model(images)
record.end(output, loss=nn.functional.cross_entropy(output, torch.arange(4)))
