"""Segmentation: a U-Net under Dice and binary cross-entropy; some masks are empty."""

import torch
from record import Record
from torch import nn

torch.manual_seed(4)
record = Record()


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.SiLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.d1, self.d2, self.mid = conv(1, 8), conv(8, 16), conv(16, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.u1, self.out = conv(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = self.d1(x)
        b = self.mid(self.d2(nn.functional.max_pool2d(a, 2)))
        return self.out(self.u1(torch.cat([a, self.up(b)], dim=1)))


def dice(logits, mask, smooth=1.0):
    p = logits.sigmoid().flatten(1)
    m = mask.flatten(1)
    return 1 - ((2 * (p * m).sum(1) + smooth) / (p.sum(1) + m.sum(1) + smooth)).mean()


def batch(n=6):
    mask = torch.zeros(n, 1, 16, 16)
    for i in range(n - 1):  # the last has nothing to be found
        r, c = torch.randint(0, 10, (2,)).tolist()
        mask[i, :, r : r + 6, c : c + 6] = 1
    return mask + 0.5 * torch.randn_like(mask), mask


model = UNet()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)
for step in range(25):
    x, mask = batch()
    logits = model(x)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, mask) + dice(logits, mask)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    optimizer.step()
    plateau.step(loss.item())
    record(step, model, loss=loss.item())
x, mask = batch()
with torch.no_grad():
    record.end(model(x), loss=dice(model(x), mask))
