"""LSGAN on a ring of points; labels are smoothed, the generator gets two updates of three."""

import math

import torch
from record import Record
from torch import nn

torch.manual_seed(18)
record = Record()
G = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
D = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
optG = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.5, 0.999))
optD = torch.optim.RMSprop(D.parameters(), lr=1e-3)


def ring(n):
    angle = 2 * math.pi * torch.randint(8, (n,)) / 8
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2)


for step in range(36):
    z = torch.randn(32, 4)
    if step % 3 == 0:
        D.zero_grad()
        lossD = 0.5 * ((D(ring(32)) - 0.9) ** 2).mean() + 0.5 * (D(G(z).detach()) ** 2).mean()
        lossD.backward()
        optD.step()
    else:
        for p in D.parameters():
            p.requires_grad_(False)
        G.zero_grad()
        lossG = 0.5 * ((D(G(z)) - 1) ** 2).mean()
        lossG.backward()
        optG.step()
        for p in D.parameters():
            p.requires_grad_(True)
    record(step, G, D, loss=lossD.item())
with torch.no_grad():
    fake = G(torch.randn(64, 4))
record.end(fake, loss=(fake.norm(dim=1) - 1).square().mean())
