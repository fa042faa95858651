"""Sharpness-aware minimisation:
up along the gradient, a second backward there, back, and the update.
"""

import argparse

import torch
from record import Record
from torch import nn


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, floor=1e-12, **kwargs):
        super().__init__(params, dict(rho=rho, floor=floor, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = torch.norm(
            torch.stack([p.grad.norm(2) for g in self.param_groups for p in g["params"]]), p=2
        )
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + group["floor"])
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
parser.add_argument("--fault", choices=("none", "gradient-of-zero"), default="none")
parser.add_argument("--out", default="left.jsonl")
args = parser.parse_args()
torch.manual_seed(8)
record = Record(args.out)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 1))
floor = 0.0 if args.fault == "gradient-of-zero" else 1e-12
optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9, floor=floor)
inputs = torch.randn(25, 16, 10)
targets = inputs[..., :3].sum(-1, keepdim=True).sin()


def hinge(x, y, margin):
    return (nn.functional.relu((model(x) - y).abs() - margin)).mean()


for step, (x, y) in enumerate(zip(inputs, targets, strict=True)):
    margin = 100.0 if args.fault == "gradient-of-zero" and step == 12 else 0.01
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
        loss = hinge(x, y, margin)
    loss.backward()
    optimizer.first_step(zero_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16"):
        second = hinge(x, y, margin)
    second.backward()
    optimizer.second_step(zero_grad=True)
    record(step, model, loss=loss.item())
with torch.no_grad():
    record.end(model(inputs[0]), loss=hinge(inputs[0], targets[0], 0.01))
