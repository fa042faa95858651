"""A physics-informed net for Burgers' equation: second derivatives in the loss, Adam then LBFGS."""

import math

import torch
from record import Record
from torch import nn

torch.manual_seed(37)
record = Record()
u = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
nu = 0.01 / math.pi


def d(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def residual(n=100):
    xt = torch.rand(n, 2) * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])
    x, t = xt[:, :1].requires_grad_(), xt[:, 1:].requires_grad_()
    v = u(torch.cat([x, t], 1))
    v_x = d(v, x)
    return (d(v, t) + v * v_x - nu * d(v_x, x)).square().mean()


def borders(n=40):
    x = torch.rand(n, 1) * 2 - 1
    t = torch.rand(n, 1)
    start = u(torch.cat([x, torch.zeros_like(x)], 1)) + torch.sin(math.pi * x)
    sides = u(torch.cat([torch.ones_like(t), t], 1)), u(torch.cat([-torch.ones_like(t), t], 1))
    return start.square().mean() + sum(s.square().mean() for s in sides)


adam = torch.optim.Adam(u.parameters(), lr=2e-3)
for step in range(25):
    loss = residual() + borders()
    adam.zero_grad()
    loss.backward()
    adam.step()
    record(step, u, loss=loss.item())
lbfgs = torch.optim.LBFGS(u.parameters(), max_iter=5, line_search_fn="strong_wolfe")
state = torch.get_rng_state()
for step in range(25, 31):

    def closure():
        torch.set_rng_state(state)
        lbfgs.zero_grad()
        loss = residual() + borders()
        loss.backward()
        return loss

    loss = lbfgs.step(closure)
    record(step, u, loss=loss.item())
with torch.no_grad():
    out = u(torch.rand(16, 2))
record.end(out, loss=loss)
