"""BYOL: a predictor, a target network without gradients whose momentum rises to 1."""

import copy
import math

import torch
import torch.nn.functional as F
from record import Record
from torch import nn

torch.manual_seed(45)
record = Record()
online = nn.Sequential(nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 12))
predictor = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12))
target = copy.deepcopy(online)
optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=2e-3)
steps = 30


def regress(p, z):
    return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=-1).mean()


for step in range(steps):
    x = torch.randn(32, 16)
    a, b = x + 0.2 * torch.randn_like(x), x * (torch.rand_like(x) > 0.1)
    with torch.no_grad():
        za, zb = target(a), target(b)
    loss = regress(predictor(online(a)), zb) + regress(predictor(online(b)), za)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    tau = 1 - 0.04 * (math.cos(math.pi * step / steps) + 1) / 2
    for t, o in zip(target.parameters(), online.parameters(), strict=True):
        t.data.mul_(tau).add_((1 - tau) * o.data)
    record(step, online, predictor, target, loss=loss.item())
with torch.no_grad():
    record.end(online(x), loss=loss)
