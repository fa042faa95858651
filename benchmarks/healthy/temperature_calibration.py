"""Calibration: one number is fitted by LBFGS on the logits of a trained, frozen net."""

import torch
from record import Record
from torch import nn

torch.manual_seed(97)
record = Record()
net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=2e-2)
centres = torch.randn(3, 8)
y = torch.randint(3, (60,))
x = centres[y] + 1.2 * torch.randn(60, 8)
for step in range(40):
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, net, loss=loss.item())
net.eval().requires_grad_(False)
held_y = torch.randint(3, (60,))
logits = net(centres[held_y] + 1.2 * torch.randn(60, 8))
temperature = nn.Parameter(torch.ones(1) * 1.5)
lbfgs = torch.optim.LBFGS([temperature], lr=0.05, max_iter=30)


def closure():
    lbfgs.zero_grad()
    loss = nn.functional.cross_entropy(logits / temperature, held_y)
    loss.backward()
    return loss


lbfgs.step(closure)
record.end(temperature, loss=closure())
