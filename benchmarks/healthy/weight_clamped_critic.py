"""The first Wasserstein GAN: the critic's weights are clamped to a box after every update."""

import torch
from record import Record
from torch import nn

torch.manual_seed(84)
record = Record()
G = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 2))
C = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
optG = torch.optim.RMSprop(G.parameters(), lr=5e-4)
optC = torch.optim.RMSprop(C.parameters(), lr=5e-4)
for step in range(12):
    for _ in range(5):
        real = torch.randn(32, 2) * 0.5 + torch.tensor([2.0, -1.0])
        loss_C = C(G(torch.randn(32, 3)).detach()).mean() - C(real).mean()
        optC.zero_grad()
        loss_C.backward()
        optC.step()
        for p in C.parameters():
            p.data.clamp_(-0.01, 0.01)
    loss_G = -C(G(torch.randn(32, 3))).mean()
    optG.zero_grad()
    loss_G.backward()
    optG.step()
    record(step, G, C, loss=loss_C.item())
with torch.no_grad():
    fake = G(torch.randn(64, 3))
record.end(fake, loss=(fake.mean(0) - torch.tensor([2.0, -1.0])).norm())
