"""A Bayesian net: weights are drawn anew in each forward, the KL is scaled by the data set."""

import torch
import torch.nn.functional as F
from record import Record
from torch import nn

torch.manual_seed(81)
record = Record()


class BayesLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(o, i) * 0.2)
        self.rho = nn.Parameter(torch.full((o, i), -4.0))
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x):
        sigma = F.softplus(self.rho)
        self.kl = (0.5 * (sigma.square() + self.mu.square()) - sigma.log() - 0.5).sum()
        return F.linear(x, self.mu + sigma * torch.randn_like(sigma), self.bias)


model = nn.Sequential(BayesLinear(1, 24), nn.Tanh(), BayesLinear(24, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.cat([torch.linspace(-2, -0.5, 32), torch.linspace(0.5, 2, 32)])[:, None]
y = x.sin() + 0.1 * torch.randn_like(x)
for step in range(40):
    samples = [model(x) for _ in range(3)]
    nll = sum(F.mse_loss(s, y) for s in samples) / 3 / 0.02
    loss = nll + (model[0].kl + model[2].kl) / 640
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
record.end(model[0].mu, loss=F.mse_loss(samples[0], y))
