"""GradNorm: task weights learn from the norms of the tasks' gradients, then are renormalised."""

import torch
from record import Record
from torch import nn

torch.manual_seed(63)
record = Record()
body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU())
heads = nn.ModuleList([nn.Linear(24, 1), nn.Linear(24, 1), nn.Linear(24, 1)])
weights = nn.Parameter(torch.ones(3))
optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()], lr=3e-3)
weight_optimizer = torch.optim.Adam([weights], lr=2e-2)
scales, first = torch.tensor([1.0, 10.0, 0.1]), None
last_shared = body[2].weight
for step in range(30):
    x = torch.randn(48, 8)
    h = body(x)
    wanted = torch.stack([x[:, 0], x[:, 1].sin(), x[:, 2].abs()], 1) * scales
    losses = (torch.cat([head(h) for head in heads], 1) - wanted).square().mean(0)
    first = losses.detach() if first is None else first
    (weights.detach() * losses).sum().backward(retain_graph=True)
    norms = torch.stack(
        [
            torch.autograd.grad(weights[i] * losses[i], last_shared, create_graph=True)[0].norm()
            for i in range(3)
        ]
    )
    with torch.no_grad():
        relative = losses / first
        target = norms.mean() * (relative / relative.mean()) ** 1.5
    weights.grad = torch.autograd.grad((norms - target).abs().sum(), weights)[0]
    optimizer.step()
    weight_optimizer.step()
    optimizer.zero_grad()
    weight_optimizer.zero_grad()
    weights.data = 3 * weights.data / weights.data.sum()
    record(step, body, heads, loss=losses.sum().item())
record.end(weights, loss=losses.sum())
