"""Evolution strategies: a network trained by no backward at all."""

import torch
from record import Record
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.manual_seed(17)
record = Record()
net = nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 1))
x = torch.rand(64, 2) * 2 - 1
y = (x[:, :1] * x[:, 1:]).sign()
sigma, rate, pairs = 0.1, 0.05, 16


@torch.no_grad()
def fitness(theta):
    vector_to_parameters(theta, net.parameters())
    return -nn.functional.soft_margin_loss(net(x), y)


theta = parameters_to_vector(net.parameters()).detach()
for generation in range(30):
    noise = torch.randn(pairs, len(theta))
    scores = torch.stack([fitness(theta + sigma * n) - fitness(theta - sigma * n) for n in noise])
    theta = (
        theta
        + rate
        / (2 * pairs * sigma)
        * (scores[:, None] * noise).sum(0)
        / (scores.std() + 1e-8)
        * 0.1
    )
    vector_to_parameters(theta, net.parameters())
    record(generation, net, loss=-fitness(theta).item())
with torch.no_grad():
    record.end(net(x), loss=nn.functional.soft_margin_loss(net(x), y))
