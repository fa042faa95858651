"""Masked autoencoder: three of four patches are hidden, the loss counts hidden ones only."""

import torch
from record import Record
from torch import nn

torch.manual_seed(10)
record = Record()


class MAE(nn.Module):
    def __init__(self, num=16, size=12, dim=32):
        super().__init__()
        self.embed, self.pos = nn.Linear(size, dim), nn.Parameter(torch.randn(1, num, dim) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        layer = lambda: nn.TransformerEncoderLayer(dim, 4, 64, 0.0, batch_first=True)  # noqa: E731
        self.encoder, self.decoder = layer(), layer()
        self.head = nn.Linear(dim, size)

    def forward(self, patches):
        n, num, _ = patches.shape
        x = self.embed(patches) + self.pos
        noise = torch.rand(n, num)
        order = noise.argsort(1)
        back, keep = order.argsort(1), order[:, : num // 4]
        kept = self.encoder(x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1])))
        full = torch.cat([kept, self.mask_token.expand(n, num - num // 4, -1)], dim=1)
        full = full.gather(1, back[..., None].expand(-1, -1, x.shape[-1])) + self.pos
        hidden = (back >= num // 4).float()
        error = (self.head(self.decoder(full)) - patches).square().mean(-1)
        return (error * hidden).sum() / hidden.sum()


def data(n=8):
    t = torch.arange(192) / 30
    return torch.sin(t + 6 * torch.rand(n, 1)).view(n, 16, 12)


model = MAE()
optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95))
for step in range(30):
    for group in optimizer.param_groups:
        group["lr"] = 1.5e-3 * min(1.0, (step + 1) / 6)
    loss = model(data())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
with torch.no_grad():
    record.end(model.mask_token, loss=model(data(32)))
