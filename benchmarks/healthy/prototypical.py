"""Prototypical networks: five ways, one shot; classes are new in each episode."""

import torch
from record import Record
from torch import nn

torch.manual_seed(41)
record = Record()


def block(i, o):
    return nn.Sequential(
        nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.MaxPool2d(2)
    )


encoder = nn.Sequential(block(1, 12), block(12, 12), nn.Flatten())
optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [15, 22], 0.5)
alphabet = torch.randn(40, 1, 8, 8)
for episode in range(28):
    classes = torch.randperm(40)[:5]
    draw = lambda k: alphabet[classes].repeat(k, 1, 1, 1) + 0.6 * torch.randn(5 * k, 1, 8, 8)  # noqa: E731
    support, query = draw(1), draw(3)
    prototypes = encoder(support)
    logits = -torch.cdist(encoder(query), prototypes).square()
    labels = torch.arange(5).repeat(3)
    loss = nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    record(episode, encoder, loss=loss.item())
encoder.eval()
with torch.no_grad():
    record.end(encoder(alphabet), loss=loss)
