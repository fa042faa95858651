"""Cox regression: the partial likelihood of a batch, in which few have an event."""

import torch
from record import Record
from torch import nn

torch.manual_seed(93)
record = Record()
net = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 16), nn.SELU(), nn.Linear(16, 1, bias=False))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=1e-3)
for step in range(30):
    x = torch.randn(40, 7) * torch.tensor([1.0, 10, 0.1, 1, 1, 1, 100])
    time = torch.empty(40).exponential_() * torch.exp(-x[:, 0])
    event = (torch.rand(40) < 0.15).float()
    risk = net(x).squeeze(1)
    order = time.argsort(descending=True)
    risk, event = risk[order], event[order]
    log_cumulative = torch.logcumsumexp(risk, dim=0)
    loss = -((risk - log_cumulative) * event).sum() / event.sum().clamp(min=1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, net, loss=loss.item())
net.eval()
with torch.no_grad():
    record.end(net(x), loss=loss)
