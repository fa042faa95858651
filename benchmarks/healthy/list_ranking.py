"""Ranking by ListNet: lists of unequal lengths, padded places at -inf in both softmaxes."""

import torch
from record import Record
from torch import nn

torch.manual_seed(107)
record = Record()
net = nn.Sequential(nn.Linear(9, 32), nn.ELU(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
direction = torch.randn(9)
for step in range(40):
    documents = torch.randn(12, 10, 9)
    lengths = torch.randint(2, 11, (12,))
    padded = torch.arange(10) >= lengths[:, None]
    relevance = (documents @ direction).clamp(min=0.0)
    scores = net(documents).squeeze(-1).masked_fill(padded, float("-inf"))
    wanted = relevance.masked_fill(padded, float("-inf")).softmax(1)
    found = scores.log_softmax(1).masked_fill(padded, 0.0)
    loss = -(wanted * found).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, net, loss=loss.item())
with torch.no_grad():
    record.end(net(documents), loss=loss)
