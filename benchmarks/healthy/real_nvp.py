"""RealNVP: coupling layers with alternating masks; their last layers begin at 0."""

import math

import torch
from record import Record
from torch import nn

torch.manual_seed(24)
record = Record()


class Coupling(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 4))
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)
        self.scale = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        s, t = self.net(x * self.mask).chunk(2, -1)
        s = torch.tanh(s) * self.scale.exp() * (1 - self.mask)
        return x * s.exp() + t * (1 - self.mask), s.sum(-1)


masks = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]
flow = nn.ModuleList(Coupling(masks[i % 2]) for i in range(4))
optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3, weight_decay=1e-5)


def nll(x):
    logdet = 0.0
    for layer in flow:
        x, more = layer(x)
        logdet = logdet + more
    return (0.5 * x.square().sum(-1) + math.log(2 * math.pi) - logdet).mean()


def banana(n):
    a = torch.randn(n)
    return torch.stack([a, 0.5 * a.square() + 0.3 * torch.randn(n)], 1)


for step in range(35):
    loss = nll(banana(64))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(flow.parameters(), 10.0)
    optimizer.step()
    record(step, flow, loss=loss.item())
with torch.no_grad():
    record.end(flow[0].scale, loss=nll(banana(256)))
