"""MAML on sines: two inner updates by gradients of gradients, one outer update over four tasks."""

import torch
from record import Record
from torch import nn
from torch.func import functional_call

torch.manual_seed(103)
record = Record()
net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)


def task():
    height, phase = 0.5 + 4 * torch.rand(()), 3 * torch.rand(())

    def drawn(number):
        x = 10 * torch.rand(number, 1) - 5
        return x, height * torch.sin(x + phase)

    return drawn


def error(weights, x, y):
    return nn.functional.mse_loss(functional_call(net, weights, (x,)), y)


for step in range(25):
    optimizer.zero_grad()
    total = 0.0
    for _ in range(4):
        drawn = task()
        weights = dict(net.named_parameters())
        for _ in range(2):
            found = torch.autograd.grad(
                error(weights, *drawn(10)), list(weights.values()), create_graph=True
            )
            weights = {
                name: value - 0.01 * gradient
                for (name, value), gradient in zip(weights.items(), found, strict=True)
            }
        outer = error(weights, *drawn(10)) / 4
        outer.backward()
        total += outer.item()
    optimizer.step()
    record(step, net, loss=total)
with torch.no_grad():
    record.end(net(torch.linspace(-5, 5, 9)[:, None]), loss=total)
