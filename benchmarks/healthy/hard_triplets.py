"""Metric learning by batch-hard triplets: distances with a root, and a loss that is often 0."""

import torch
from record import Record
from torch import nn

torch.manual_seed(108)
record = Record()
net = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
centres = 3 * torch.randn(6, 12)
for step in range(40):
    y = torch.arange(6).repeat_interleave(4)
    x = centres[y] + torch.randn(24, 12)
    embedded = nn.functional.normalize(net(x), dim=1)
    squared = (2 - 2 * embedded @ embedded.T).clamp(min=0.0)
    is_zero = (squared < 1e-12).float()
    distance = (squared + is_zero * 1e-12).sqrt() * (1 - is_zero)
    same = y[:, None] == y
    furthest = distance.masked_fill(~same, 0.0).amax(1)
    nearest = distance.masked_fill(same, float("inf")).amin(1)
    loss = nn.functional.relu(furthest - nearest + 0.3).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, net, loss=loss.item())
net.eval()
with torch.no_grad():
    record.end(net(centres), loss=loss)
