"""A Gaussian process: three hyperparameters by the marginal likelihood and a Cholesky factor."""

import math

import torch
from record import Record
from torch import nn

torch.manual_seed(91)
record = Record()


class GP(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_length, self.log_scale = (
            nn.Parameter(torch.zeros(())),
            nn.Parameter(torch.zeros(())),
        )
        self.log_noise = nn.Parameter(torch.tensor(-2.0))

    def kernel(self, a, b):
        gap = (a - b.T) / self.log_length.exp()
        return (2 * self.log_scale).exp() * torch.exp(-0.5 * gap.square())

    def forward(self, x, y):
        k = self.kernel(x, x) + ((2 * self.log_noise).exp() + 1e-6) * torch.eye(len(x))
        chol = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y, chol)
        fit = 0.5 * (y * alpha).sum()
        return fit + chol.diagonal().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)


x = torch.linspace(0, 6, 30)[:, None]
y = x.sin() + 0.1 * torch.randn_like(x)
gp = GP().double()
optimizer = torch.optim.Rprop(gp.parameters(), lr=0.05)
for step in range(40):
    loss = gp(x.double(), y.double())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, gp, loss=loss.item())
record.end(gp.log_length, loss=loss)
