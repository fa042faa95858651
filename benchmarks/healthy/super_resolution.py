"""Super-resolution: sub-pixel convolution, Charbonnier loss, orthogonal initialisation."""

import torch
from record import Record
from torch import nn

torch.manual_seed(7)
record = Record()


class ESPCN(nn.Module):
    def __init__(self, factor=2):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, 1, 2), nn.Conv2d(16, 16, 3, 1, 1)
        self.conv3 = nn.Conv2d(16, factor**2, 3, 1, 1)
        self.shuffle = nn.PixelShuffle(factor)
        for conv in (self.conv1, self.conv2):
            nn.init.orthogonal_(conv.weight, nn.init.calculate_gain("relu"))

    def forward(self, x):
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return self.shuffle(self.conv3(x))


def pictures(n):
    t = torch.linspace(0, 6.28, 16)
    waves = torch.rand(n, 2) * 3
    return (torch.sin(waves[:, :1, None] * t[None, :, None] + waves[:, 1:, None] * t))[:, None]


model = ESPCN()
optimizer = torch.optim.Adam([
    {"params": model.conv1.parameters()},
    {"params": model.conv2.parameters()},
    {"params": model.conv3.parameters(), "lr": 1e-4},
], lr=1e-3)  # fmt: skip
for step in range(30):
    high = pictures(8)
    low = nn.functional.avg_pool2d(high, 2)
    loss = ((model(low) - high) ** 2 + 1e-6).sqrt().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
high = pictures(8)
with torch.no_grad():
    out = model(nn.functional.avg_pool2d(high, 2))
record.end(out, loss=(out - high).square().mean())
