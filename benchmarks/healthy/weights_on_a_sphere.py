"""Rows of the weights are brought back to length 1 after each update (nGPT, ArcFace's classes)."""

import torch
import torch.nn.functional as F
from record import Record
from torch import nn

torch.manual_seed(85)
record = Record()
encoder = nn.Linear(12, 24, bias=False)
classes = nn.Parameter(F.normalize(torch.randn(6, 24), dim=1))
optimizer = torch.optim.Adam([*encoder.parameters(), classes], lr=1e-2)
centres = torch.randn(6, 12)


@torch.no_grad()
def project():
    for w in (encoder.weight, classes):
        w.copy_(F.normalize(w, dim=1))


project()
for step in range(35):
    y = torch.randint(6, (32,))
    z = F.normalize(encoder(centres[y] + 0.5 * torch.randn(32, 12)), dim=1)
    cosine = z @ classes.T
    margin = 0.2 * F.one_hot(y, 6)
    loss = F.cross_entropy(16 * (cosine - margin), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    project()
    record(step, encoder, loss=loss.item())
record.end(classes, loss=loss)
