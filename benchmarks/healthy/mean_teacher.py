"""Mean teacher: consistency on unlabelled points, its weight rising from exactly 0."""

import copy
import math

import torch
import torch.nn.functional as F
from record import Record
from torch import nn

torch.manual_seed(89)
record = Record()
student = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
teacher = copy.deepcopy(student)
for p in teacher.parameters():
    p.detach_()
optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)


def moons(n):
    t = torch.rand(n) * math.pi
    y = torch.randint(2, (n,))
    s = 2.0 * y - 1
    return torch.stack([t.cos() * s + 0.5 * s, t.sin() * s], 1) + 0.1 * torch.randn(n, 2), y


x_lab, y_lab = moons(8)
for step in range(40):
    x, _ = moons(64)
    ramp = 0.0 if step == 0 else math.exp(-5 * (1 - min(1.0, step / 20)) ** 2)
    supervised = F.cross_entropy(student(x_lab), y_lab)
    with torch.no_grad():
        target = F.softmax(teacher(x + 0.05 * torch.randn_like(x)), dim=1)
    consistency = F.mse_loss(F.softmax(student(x + 0.05 * torch.randn_like(x)), dim=1), target)
    loss = supervised + 10 * ramp * consistency
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    alpha = min(1 - 1 / (step + 1), 0.97)
    for e, p in zip(teacher.parameters(), student.parameters(), strict=True):
        e.data.mul_(alpha).add_(p.data, alpha=1 - alpha)
    record(step, student, teacher, loss=loss.item())
x, y = moons(64)
with torch.no_grad():
    record.end(teacher.eval()(x), loss=F.cross_entropy(teacher(x), y))
