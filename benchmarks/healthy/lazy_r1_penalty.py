"""A GAN with R1 every fourth step only: a double backward in a step of its own."""

import torch
from record import Record
from torch import autograd, nn

torch.manual_seed(21)
record = Record()
G = nn.Sequential(nn.Linear(6, 32), nn.Softplus(), nn.Linear(32, 3))
D = nn.Sequential(nn.Linear(3, 32), nn.Softplus(), nn.Linear(32, 1))
g_optim = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.0, 0.99))
d_optim = torch.optim.Adam(D.parameters(), lr=2e-3, betas=(0.0, 0.99))


def requires_grad(model, flag):
    for p in model.parameters():
        p.requires_grad = flag


for i in range(28):
    real = torch.randn(24, 3) * torch.tensor([1.0, 0.3, 2.0]) + 1
    requires_grad(G, False)
    requires_grad(D, True)
    fake = G(torch.randn(24, 6))
    d_loss = nn.functional.softplus(-D(real)).mean() + nn.functional.softplus(D(fake)).mean()
    D.zero_grad()
    d_loss.backward()
    d_optim.step()
    if i % 4 == 0:
        real.requires_grad = True
        scores = D(real)
        (grad,) = autograd.grad(scores.sum(), real, create_graph=True)
        r1 = grad.square().sum(1).mean()
        D.zero_grad()
        (5.0 * r1 * 4 + 0 * scores[0]).sum().backward()
        d_optim.step()
    requires_grad(G, True)
    requires_grad(D, False)
    g_loss = nn.functional.softplus(-D(G(torch.randn(24, 6)))).mean()
    G.zero_grad()
    g_loss.backward()
    g_optim.step()
    record(i, G, D, loss=d_loss.item())
with torch.no_grad():
    fake = G(torch.randn(64, 6))
record.end(fake, loss=(fake.mean(0) - 1).square().mean())
