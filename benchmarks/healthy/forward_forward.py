"""Forward-forward: each layer has a loss and an optimizer of its own, nothing flows through."""

import torch
from record import Record
from torch import nn

torch.manual_seed(87)
record = Record()


class Layer(nn.Linear):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.opt = torch.optim.Adam(self.parameters(), lr=1e-2)

    def forward(self, x):
        return torch.relu(super().forward(x / (x.norm(dim=1, keepdim=True) + 1e-4)))

    def learn(self, good, bad, threshold=1.0):
        g, b = self(good).pow(2).mean(1), self(bad).pow(2).mean(1)
        loss = torch.log1p(torch.exp(torch.cat([threshold - g, b - threshold]))).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return self(good).detach(), self(bad).detach(), loss.item()


net = nn.ModuleList([Layer(16, 40), Layer(40, 40)])
centres = torch.randn(4, 12)


def overlay(x, y):
    return torch.cat([nn.functional.one_hot(y, 4).float(), x], 1)


for step in range(40):
    y = torch.randint(4, (32,))
    x = centres[y] + 0.7 * torch.randn(32, 12)
    good, bad = overlay(x, y), overlay(x, (y + torch.randint(1, 4, (32,))) % 4)
    for layer in net:
        good, bad, loss = layer.learn(good, bad)
    record(step, net, loss=loss)
record.end(good, loss=loss)
