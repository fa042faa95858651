"""Sharpness-aware minimisation: up along the gradient, a second backward, back, and the update."""

import torch
from record import Record
from torch import nn

torch.manual_seed(102)
record = Record()
net = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4)
)
parameters = list(net.parameters())
optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
patterns = torch.randn(4, 1, 8, 8)


def loss_of(x, y):
    return nn.functional.cross_entropy(net(x), y, label_smoothing=0.1)


for step in range(30):
    y = torch.randint(0, 4, (32,))
    x = patterns[y] + 0.5 * torch.randn(32, 1, 8, 8)
    loss = loss_of(x, y)
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [p.grad * (0.05 / (norm + 1e-12)) for p in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
    optimizer.zero_grad()
    for module in net.modules():  # running statistics are those of the first pass alone
        if isinstance(module, nn.BatchNorm2d):
            module.momentum, kept = 0.0, module.momentum
    loss_of(x, y).backward()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = kept
    with torch.no_grad():
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    record(step, net, loss=loss.item())
net.eval()
with torch.no_grad():
    record.end(net(patterns), loss=loss)
