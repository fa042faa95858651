"""A small radiance field: positional encodings, densities, transmittance by a running product."""

import torch
from record import Record
from torch import nn

torch.manual_seed(92)
record = Record()
net = nn.Sequential(
    nn.Linear(2 * 2 * 5, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2)
)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3, eps=1e-7)
gamma = 0.1 ** (1 / 40)


def encode(p):
    bands = p[..., None] * 2.0 ** torch.arange(5)
    return torch.cat([bands.sin(), bands.cos()], -1).flatten(-2)


def render(origins, directions, num=24):
    t = torch.linspace(0.0, 2.0, num) + torch.rand(len(origins), num) * 2 / num
    t = t.sort(-1).values
    density, colour = net(encode(origins[:, None] + t[..., None] * directions[:, None])).unbind(-1)
    gaps = torch.cat([t[:, 1:] - t[:, :-1], torch.full_like(t[:, :1], 1e10)], -1)
    alpha = 1 - torch.exp(-nn.functional.softplus(density - 1) * gaps)
    clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[
        :, :-1
    ]
    return (alpha * clear * colour.sigmoid()).sum(-1)


for step in range(30):
    angle = torch.rand(32) * 6.2832
    origins = torch.stack([angle.cos(), angle.sin()], 1)
    directions = -origins + 0.3 * torch.randn(32, 2)
    closest = (origins + directions).norm(dim=1)
    wanted = torch.where(closest < 0.4, 0.8, 0.0)
    loss = (render(origins, directions) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] *= gamma
    record(step, net, loss=loss.item())
with torch.no_grad():
    record.end(render(origins, directions), loss=loss)
