"""Reptile: a copy is trained on a task, the weights move towards it; no optimizer of their own."""

import copy

import torch
from record import Record
from torch import nn

torch.manual_seed(40)
record = Record()
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
x_all = torch.linspace(-5, 5, 50)[:, None]


def train_on(net, x, y):
    net.zero_grad()
    loss = (net(x) - y).square().mean()
    loss.backward()
    for p in net.parameters():
        p.data -= 0.02 * p.grad.data
    return loss


for iteration in range(30):
    before = copy.deepcopy(model.state_dict())
    phase, amplitude = torch.rand(1) * 6.28, torch.rand(1) * 4 + 0.1
    y_all = amplitude * torch.sin(x_all + phase)
    order = torch.randperm(50)
    for start in range(0, 50, 10):
        chosen = order[start : start + 10]
        loss = train_on(model, x_all[chosen], y_all[chosen])
    after = model.state_dict()
    outer = 0.1 * (1 - iteration / 30)
    model.load_state_dict({k: before[k] + (after[k] - before[k]) * outer for k in before})
    record(iteration, model, loss=loss.item())
with torch.no_grad():
    record.end(model(x_all), loss=loss)
