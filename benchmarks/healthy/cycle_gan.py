"""CycleGAN between two clouds: itertools.chain of two generators, buffer of fakes, linear decay."""

import itertools
import random

import torch
from record import Record
from torch import nn

torch.manual_seed(20)
record = Record()


def net():
    return nn.Sequential(nn.Linear(2, 24), nn.InstanceNorm1d(24), nn.ReLU(), nn.Linear(24, 2))


def critic():
    return nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))


G_AB, G_BA, D_A, D_B = net(), net(), critic(), critic()
mse, l1 = nn.MSELoss(), nn.L1Loss()
opt_G = torch.optim.Adam(itertools.chain(G_AB.parameters(), G_BA.parameters()), 2e-3, (0.5, 0.999))
opt_DA = torch.optim.Adam(D_A.parameters(), lr=2e-3, betas=(0.5, 0.999))
opt_DB = torch.optim.Adam(D_B.parameters(), lr=2e-3, betas=(0.5, 0.999))
schedules = [
    torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0 - max(0, step - 10) / 15)
    for o in (opt_G, opt_DA, opt_DB)
]
pool = []
for step in range(25):
    A, B = torch.randn(16, 2), torch.randn(16, 2) @ torch.tensor([[0.2, 1.0], [1.0, -0.3]]) + 2
    fake_B, fake_A = G_AB(A), G_BA(B)
    gan = mse(D_B(fake_B), torch.ones(16, 1)) + mse(D_A(fake_A), torch.ones(16, 1))
    cycle = l1(G_BA(fake_B), A) + l1(G_AB(fake_A), B)
    identity = l1(G_BA(A), A) + l1(G_AB(B), B)
    loss_G = gan + 10 * cycle + 5 * identity
    opt_G.zero_grad()
    loss_G.backward()
    opt_G.step()
    pool.append(fake_A.detach())
    for D, opt, real, fake in (
        (D_A, opt_DA, A, random.choice(pool)),
        (D_B, opt_DB, B, fake_B.detach()),
    ):
        opt.zero_grad()
        loss_D = 0.5 * (mse(D(real), torch.ones(16, 1)) + mse(D(fake), torch.zeros(16, 1)))
        loss_D.backward()
        opt.step()
    for schedule in schedules:
        schedule.step()
    record(step, G_AB, G_BA, D_A, D_B, loss=loss_G.item())
with torch.no_grad():
    record.end(G_AB(A), loss=cycle)
