"""An energy-based model: Langevin chains on the input, then the contrast of two energies."""

import torch
from record import Record
from torch import nn

torch.manual_seed(28)
record = Record()
energy = nn.Sequential(nn.Linear(2, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
optimizer = torch.optim.Adam(energy.parameters(), lr=1e-3, betas=(0.0, 0.999))
buffer = torch.rand(256, 2) * 4 - 2


def langevin(x, steps=8, size=0.1):
    energy.requires_grad_(False)
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(energy(x).sum(), x)
        x = x - 0.5 * size * grad.clamp(-1, 1) + 0.05 * torch.randn_like(x)
    energy.requires_grad_(True)
    return x.detach()


for step in range(25):
    angle = torch.rand(32) * 6.2832
    real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(32, 2)
    index = torch.randint(256, (32,))
    fake = langevin(buffer[index])
    buffer[index] = fake
    plus, minus = energy(real), energy(fake)
    loss = plus.mean() - minus.mean() + 0.1 * (plus**2 + minus**2).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(energy.parameters(), 0.1)
    optimizer.step()
    record(step, energy, loss=loss.item())
with torch.no_grad():
    record.end(energy(buffer), loss=loss)
