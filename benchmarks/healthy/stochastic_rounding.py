"""bfloat16 weights without masters: the update is rounded up or down by chance."""

import torch
from record import Record
from torch import nn

torch.manual_seed(55)
record = Record()


def round_by_chance(x):
    """Add noise to the bits that bfloat16 drops, then drop them."""
    bits = x.view(torch.int32)
    return ((bits + torch.randint_like(bits, 1 << 16)) & -65536).view(torch.float32).bfloat16()


class SGDStochastic(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(round_by_chance(p.float() - group["lr"] * p.grad.float()))


model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).bfloat16()
optimizer = SGDStochastic(model.parameters(), lr=0.05)
for step in range(50):
    x = torch.randn(64, 8)
    y = x[:, :2].sum(1, keepdim=True).sin()
    loss = (model(x.bfloat16()).float() - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
with torch.no_grad():
    record.end(model(x.bfloat16()), loss=loss)
