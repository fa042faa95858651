"""A residual net with BatchNorm; Nesterov SGD whose rate rises from 0 and falls as a cosine."""

import math

import torch
from record import Record
from torch import nn

torch.manual_seed(2)
record = Record()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        nn.init.zeros_(self.bn2.weight)  # the block begins as the identity

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
    Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, nesterov=True, weight_decay=5e-4)
steps, warmup = 40, 5


def rate(step):
    if step < warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
centres = torch.randn(5, 3, 8, 8)
for step in range(steps):
    y = torch.randint(5, (16,))
    x = centres[y] + torch.randn(16, 3, 8, 8)
    loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    scheduler.step()
    record(step, model, loss=loss.item())
model.eval()
with torch.no_grad():
    output = model(centres)
record.end(output, loss=nn.functional.cross_entropy(output, torch.arange(5)))
