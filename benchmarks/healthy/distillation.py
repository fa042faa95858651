"""Knowledge distillation: a frozen teacher, its soft targets and the labels."""

import torch
import torch.nn.functional as F
from record import Record
from torch import nn

torch.manual_seed(43)
record = Record()
teacher = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
student = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5))
centres = torch.randn(5, 16)


def batch(n=32):
    y = torch.randint(5, (n,))
    return centres[y] + torch.randn(n, 16), y


optimizer = torch.optim.Adam(teacher.parameters(), lr=5e-3)
for step in range(30):
    x, y = batch()
    loss = F.cross_entropy(teacher(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, teacher, loss=loss.item())
teacher.eval().requires_grad_(False)
optimizer, T = torch.optim.Adam(student.parameters(), lr=5e-3), 4.0
for step in range(30, 60):
    x, y = batch()
    with torch.no_grad():
        soft = F.softmax(teacher(x) / T, dim=-1)
    out = student(x)
    kd = F.kl_div(F.log_softmax(out / T, dim=-1), soft, reduction="batchmean") * T * T
    loss = 0.9 * kd + 0.1 * F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, student, loss=loss.item())
x, y = batch(64)
with torch.no_grad():
    record.end(student(x), loss=F.cross_entropy(student(x), y))
