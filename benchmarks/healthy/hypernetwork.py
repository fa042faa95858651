"""A hypernetwork writes the weights of a small net from a description of the task."""

import torch
from record import Record
from torch import nn
from torch.func import functional_call, vmap

torch.manual_seed(42)
record = Record()
target = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1)).requires_grad_(False)
shapes = {k: p.shape for k, p in target.named_parameters()}
sizes = [s.numel() for s in shapes.values()]
hyper = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, sum(sizes)))
with torch.no_grad():
    hyper[2].weight.mul_(0.3)
optimizer = torch.optim.Adamax(hyper.parameters(), lr=3e-3)


def apply(task, x):
    parts = hyper(task).split(sizes)
    return functional_call(
        target, {k: p.view(s) for (k, s), p in zip(shapes.items(), parts, strict=True)}, (x,)
    )


for step in range(30):
    task = torch.rand(8, 2)
    x = torch.rand(8, 20, 1) * 4 - 2
    y = task[:, :1, None] * torch.sin(2 * x + task[:, 1:, None])
    loss = (vmap(apply)(task, x) - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, hyper, loss=loss.item())
with torch.no_grad():
    record.end(vmap(apply)(task, x), loss=loss)
