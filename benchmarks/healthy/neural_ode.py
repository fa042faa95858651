"""A neural ODE: Runge-Kutta by hand, backward by the adjoint in a Function of its own."""

import torch
from record import Record
from torch import nn

torch.manual_seed(25)
record = Record()


class Dynamics(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))

    def forward(self, y):
        return self.net(y**3)


def rk4(f, y, h):
    k1 = f(y)
    k2 = f(y + h / 2 * k1)
    k3 = f(y + h / 2 * k2)
    k4 = f(y + h * k3)
    return y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


class Solve(torch.autograd.Function):
    """Forward without a graph; backward integrates state and adjoint backwards in time."""

    @staticmethod
    def forward(ctx, f, y, steps, h, *params):
        ctx.f, ctx.steps, ctx.h = f, steps, h
        with torch.no_grad():
            for _ in range(steps):
                y = rk4(f, y, h)
        ctx.save_for_backward(y, *params)
        return y

    @staticmethod
    def backward(ctx, adjoint):
        y, *params = ctx.saved_tensors
        totals = [torch.zeros_like(p) for p in params]
        for _ in range(ctx.steps):
            with torch.no_grad():
                before = rk4(ctx.f, y, -ctx.h)
            with torch.enable_grad():
                start = before.detach().requires_grad_()
                end = rk4(ctx.f, start, ctx.h)
                adjoint, *more = torch.autograd.grad(end, (start, *params), adjoint)
            totals = [t + m for t, m in zip(totals, more, strict=True)]
            y = before
        return None, adjoint, None, None, *totals


f = Dynamics()
truth = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
optimizer = torch.optim.RMSprop(f.parameters(), lr=2e-3)
for step in range(25):
    y0 = torch.rand(16, 2) * 2 - 1
    with torch.no_grad():
        wanted = y0
        for _ in range(5):
            wanted = rk4(lambda y: (y**3) @ truth, wanted, 0.05)
    loss = (Solve.apply(f, y0, 5, 0.05, *f.parameters()) - wanted).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, f, loss=loss.item())
record.end(Solve.apply(f, y0, 5, 0.05, *f.parameters()), loss=loss)
