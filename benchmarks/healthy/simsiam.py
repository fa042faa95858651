"""SimSiam: one encoder, a stopped gradient on one side, a fixed rate for the predictor."""

import math

import torch
from record import Record
from torch import nn

torch.manual_seed(46)
record = Record()


class SimSiam(nn.Module):
    def __init__(self, dim=24, pred=8):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(16, dim, bias=False), nn.BatchNorm1d(dim), nn.ReLU(inplace=True),
            nn.Linear(dim, dim), nn.BatchNorm1d(dim, affine=False),
        )  # fmt: skip
        self.encoder[3].bias.requires_grad = False  # the BatchNorm that follows takes it away
        self.predictor = nn.Sequential(
            nn.Linear(dim, pred, bias=False),
            nn.BatchNorm1d(pred),
            nn.ReLU(inplace=True),
            nn.Linear(pred, dim),
        )

    def forward(self, a, b):
        za, zb = self.encoder(a), self.encoder(b)
        return self.predictor(za), self.predictor(zb), za.detach(), zb.detach()


model, criterion = SimSiam(), nn.CosineSimilarity(dim=1)
groups = [
    {"params": model.encoder.parameters(), "fix_lr": False},
    {"params": model.predictor.parameters(), "fix_lr": True},
]
optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9, weight_decay=1e-4)
for step in range(30):
    lr = 0.05 * 0.5 * (1 + math.cos(math.pi * step / 30))
    for group in optimizer.param_groups:
        group["lr"] = 0.05 if group["fix_lr"] else lr
    x = torch.randn(24, 16)
    pa, pb, za, zb = model(x + 0.2 * torch.randn_like(x), x + 0.2 * torch.randn_like(x))
    loss = -(criterion(pa, zb).mean() + criterion(pb, za).mean()) * 0.5
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
model.eval()
with torch.no_grad():
    record.end(model.encoder(x), loss=loss)
