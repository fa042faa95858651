"""Siamese net with a margin: pairs that are far enough apart give no gradient at all."""

import torch
from record import Record
from torch import nn

torch.manual_seed(6)
record = Record()
encoder = nn.Sequential(nn.Linear(10, 32), nn.PReLU(), nn.Linear(32, 8))
optimizer = torch.optim.Adam(encoder.parameters(), lr=5e-3)
centres = torch.randn(3, 10) * 2


def pair(n, same):
    a = torch.randint(3, (n,))
    b = a if same else (a + torch.randint(1, 3, (n,))) % 3
    return centres[a] + 0.1 * torch.randn(n, 10), centres[b] + 0.1 * torch.randn(n, 10)


for step in range(60):
    same = step % 3 == 0
    a, b = pair(4, same)
    distance = nn.functional.pairwise_distance(encoder(a), encoder(b))
    loss = distance.square().mean() if same else torch.relu(1.0 - distance).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, encoder, loss=loss.item())
a, b = pair(32, same=True)
with torch.no_grad():
    record.end(encoder(a), loss=nn.functional.pairwise_distance(encoder(a), encoder(b)).mean())
