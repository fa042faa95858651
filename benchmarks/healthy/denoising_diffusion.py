"""DDPM on images of 8 x 8: a cosine schedule of noise, an average of the weights, samples drawn."""

import copy
import math

import torch
from record import Record
from torch import nn

torch.manual_seed(104)
record = Record()
STEPS = 50
place = torch.arange(STEPS + 1) / STEPS
kept = torch.cos((place + 0.008) / 1.008 * math.pi / 2) ** 2
alpha_bar = (kept / kept[0])[1:].clamp(min=1e-4)
beta = (1 - kept[1:] / kept[:-1]).clamp(max=0.999)


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.norm = nn.GroupNorm(4, 32)
        self.last = nn.Conv2d(32, 1, 3, padding=1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x, t):
        rates = torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        angles = t[:, None].float() * rates
        told = self.time(torch.cat((angles.sin(), angles.cos()), 1))
        hidden = nn.functional.silu(self.norm(self.first(x) + told[:, :, None, None]))
        return self.last(hidden)


net = Denoiser()
average = copy.deepcopy(net).requires_grad_(False)
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
for step in range(30):
    x = torch.zeros(32, 1, 8, 8)
    row = torch.randint(0, 6, (32,))
    for n in range(32):
        x[n, 0, row[n] : row[n] + 2, 2:6] = 1.0
    t = torch.randint(0, STEPS, (32,))
    noise = torch.randn_like(x)
    signal = alpha_bar[t][:, None, None, None]
    loss = nn.functional.mse_loss(net(signal.sqrt() * x + (1 - signal).sqrt() * noise, t), noise)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for old, new in zip(average.parameters(), net.parameters(), strict=True):
            old.lerp_(new, 1 - min(0.995, (1 + step) / (10 + step)))
    record(step, net, average, loss=loss.item())
with torch.no_grad():
    x = torch.randn(4, 1, 8, 8)
    for t in reversed(range(STEPS)):
        found = average(x, torch.full((4,), t))
        x = (x - beta[t] / (1 - alpha_bar[t]).sqrt() * found) / (1 - beta[t]).sqrt()
        x = x + beta[t].sqrt() * torch.randn_like(x) * (t > 0)
record.end(x, loss=loss)
