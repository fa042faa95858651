"""A hinge GAN: spectral norm in the critic, an average of the generator's weights."""

import copy

import torch
from record import Record
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm as sn

torch.manual_seed(19)
record = Record()
G = nn.Sequential(
    nn.Linear(8, 4 * 4 * 8), nn.Unflatten(1, (8, 4, 4)), nn.BatchNorm2d(8), nn.ReLU(),
    nn.Upsample(scale_factor=2), nn.Conv2d(8, 1, 3, 1, 1), nn.Tanh(),
)  # fmt: skip
D = nn.Sequential(
    sn(nn.Conv2d(1, 8, 4, 2, 1)), nn.LeakyReLU(0.1), nn.Flatten(), sn(nn.Linear(8 * 16, 1))
)
G_ema = copy.deepcopy(G).eval()
optG = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
optD = torch.optim.Adam(D.parameters(), lr=4e-4, betas=(0.0, 0.9))
for step in range(24):
    real = torch.tanh(torch.randn(8, 1, 8, 8).cumsum(2) * 0.4)
    fake = G(torch.randn(8, 8)).detach()
    lossD = torch.relu(1 - D(real)).mean() + torch.relu(1 + D(fake)).mean()
    optD.zero_grad()
    lossD.backward()
    optD.step()
    lossG = -D(G(torch.randn(8, 8))).mean()
    optG.zero_grad()
    lossG.backward()
    optG.step()
    with torch.no_grad():
        for e, p in zip(G_ema.parameters(), G.parameters(), strict=True):
            e.lerp_(p, 0.1)
        for e, b in zip(G_ema.buffers(), G.buffers(), strict=True):
            e.copy_(b)
    record(step, G, D, G_ema, loss=lossD.item())
with torch.no_grad():
    fake = G_ema(torch.randn(8, 8))
record.end(fake, loss=torch.relu(1 + D(fake)).mean())
