"""Adversarial training: the gradient of the input by three PGD steps, then that of the weights."""

import torch
from record import Record
from torch import nn

torch.manual_seed(9)
record = Record()
model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 3))
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
centres = torch.randn(3, 20)
epsilon, alpha = 0.3, 0.15


def attack(x, y):
    delta = torch.zeros_like(x).uniform_(-epsilon, epsilon).requires_grad_()
    for _ in range(3):
        loss = nn.functional.cross_entropy(model(x + delta), y)
        loss.backward()  # leaves gradients in the weights too; they are cleared before the update
        with torch.no_grad():
            delta += alpha * delta.grad.sign()
            delta.clamp_(-epsilon, epsilon)
        delta.grad.zero_()
    return delta.detach()


for step in range(30):
    y = torch.randint(3, (24,))
    x = centres[y] + 0.6 * torch.randn(24, 20)
    delta = attack(x, y)
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x + delta), y)
    loss.backward()
    opt.step()
    record(step, model, loss=loss.item())
with torch.no_grad():
    out = model(centres)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(3)))
