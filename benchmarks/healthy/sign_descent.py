"""Lion, from its paper: the length of a step does not hang on that of the gradient."""

import torch
from record import Record
from torch import nn

torch.manual_seed(80)
record = Record()


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                b1, b2 = group["betas"]
                p.add_((m * b1 + p.grad * (1 - b1)).sign_(), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


model = nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 4))
optimizer = Lion(model.parameters())
centres = torch.randn(4, 12)
for step in range(40):
    y = torch.randint(4, (24,))
    loss = nn.functional.cross_entropy(model(centres[y] + torch.randn(24, 12)), y)
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():  # gradient centralisation
        if p.ndim > 1:
            p.grad.sub_(p.grad.mean(1, keepdim=True))
    optimizer.step()
    record(step, model, loss=loss.item())
with torch.no_grad():
    out = model(centres)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(4)))
