"""Barlow Twins with LARS as in the paper's repository: biases are left out of its adaptation."""

import torch
from record import Record
from torch import nn

torch.manual_seed(47)
record = Record()


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=1e-6, momentum=0.9, eta=0.02):
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eta": eta}
        )

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                dp = p.grad
                if dp is None:
                    continue
                if p.ndim != 1:
                    dp = dp.add(p, alpha=g["weight_decay"])
                    pn, un = torch.norm(p), torch.norm(dp)
                    one = torch.ones_like(pn)
                    q = torch.where(pn > 0.0, torch.where(un > 0, g["eta"] * pn / un, one), one)
                    dp = dp.mul(q)
                state = self.state[p]
                if "mu" not in state:
                    state["mu"] = torch.zeros_like(p)
                mu = state["mu"]
                mu.mul_(g["momentum"]).add_(dp)
                p.add_(mu, alpha=-g["lr"])


model = nn.Sequential(
    nn.Linear(16, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 12, bias=False)
)
bn = nn.BatchNorm1d(12, affine=False)
optimizer = LARS([{"params": [p for p in model.parameters() if p.ndim > 1]}, {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}], lr=0.5)  # fmt: skip  # noqa: E501
for step in range(30):
    x = torch.randn(64, 16)
    c = bn(model(x + 0.1 * torch.randn_like(x))).T @ bn(model(x + 0.1 * torch.randn_like(x))) / 64
    on = torch.diagonal(c).add(-1).pow(2).sum()
    off = (c - torch.diag(torch.diagonal(c))).pow(2).sum()
    loss = on + 0.0051 * off
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, bn, loss=loss.item())
model.eval()
with torch.no_grad():
    record.end(model(x), loss=loss)
