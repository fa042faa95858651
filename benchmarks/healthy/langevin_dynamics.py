"""SGLD: noise is added to the weights in every step, far more than the gradient moves them."""

import torch
from record import Record
from torch import nn

torch.manual_seed(82)
record = Record()
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
N, kept = 256, []
x = torch.randn(N, 4)
y = x[:, :1] - x[:, 1:2]
for t in range(50):
    epsilon = 2e-4 / (1 + t / 20) ** 0.5
    for group in optimizer.param_groups:
        group["lr"] = epsilon
    chosen = torch.randint(N, (32,))
    log_prior = -0.5 * sum(p.square().sum() for p in model.parameters())
    log_likelihood = -0.5 * (model(x[chosen]) - y[chosen]).square().sum() / 0.25
    loss = -(log_prior + N / 32 * log_likelihood) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=epsilon**0.5)
        if t >= 30:
            kept.append(model(x))
    record(t, model, loss=loss.item())
mean = torch.stack(kept).mean(0)
record.end(mean, loss=(mean - y).square().mean())
