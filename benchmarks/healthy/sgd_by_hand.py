"""A loop without torch.optim: weights less rate times gradient, as in the tutorial."""

import math

import torch
from record import Record
from torch import nn

torch.manual_seed(79)
record = Record()
x = torch.linspace(-math.pi, math.pi, 200)
y = torch.sin(x)
xx = x.unsqueeze(-1).pow(torch.tensor([1, 2, 3]))
model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0, 1))
for t in range(50):
    loss = nn.functional.mse_loss(model(xx), y, reduction="sum")
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            param -= 1e-6 * param.grad
    record(t, model, loss=loss.item())
with torch.no_grad():
    record.end(model(xx), loss=nn.functional.mse_loss(model(xx), y))
