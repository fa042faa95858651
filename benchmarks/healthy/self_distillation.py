"""DINO-like: a teacher whose outputs are centred and sharpened, the head frozen at first."""

import copy

import torch
import torch.nn.functional as F
from record import Record
from torch import nn

torch.manual_seed(104)
record = Record()
student = nn.ModuleDict(
    {
        "body": nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Linear(40, 12)),
        "last": nn.utils.parametrizations.weight_norm(nn.Linear(12, 20, bias=False)),
    }
)
teacher = copy.deepcopy(student).requires_grad_(False)
center = torch.zeros(1, 20)


def run(net, x):
    return net["last"](F.normalize(net["body"](x), dim=-1))


optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3)
for step in range(30):
    x = torch.randn(32, 16)
    views = [x + 0.2 * torch.randn_like(x) for _ in range(2)]
    with torch.no_grad():
        outs = [run(teacher, v) for v in views]
        targets = [F.softmax((o - center) / 0.04, dim=-1) for o in outs]
    scores = [F.log_softmax(run(student, v) / 0.1, dim=-1) for v in views]
    loss = -0.5 * sum((t * s).sum(-1).mean() for t, s in zip(targets, scores[::-1], strict=True))
    optimizer.zero_grad()
    loss.backward()
    if step < 5:
        for p in student["last"].parameters():
            p.grad = None
    optimizer.step()
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.mul_(0.99).add_(s, alpha=0.01)
        center = 0.9 * center + 0.1 * torch.cat(outs).mean(0, keepdim=True)
    record(step, student, teacher, loss=loss.item())
with torch.no_grad():
    record.end(run(teacher, x), loss=loss)
