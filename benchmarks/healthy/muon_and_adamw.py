"""Three optimizers: Muon for matrices, AdamW for embeddings and vectors, SGD for a scalar."""

import torch
from record import Record
from torch import nn

torch.manual_seed(60)
record = Record()


def zeropower(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() / (g.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return (x.T if tall else x).to(g.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("buf", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                g = p.grad.lerp(buf, group["momentum"])
                p.add_(zeropower(g), alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, 24), nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 64, bias=False), nn.Linear(64, 24, bias=False)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, ids):
        h = self.embed(ids)
        h = h + self.down(torch.relu(self.up(self.norm(h))).square())
        return self.temperature * h @ self.embed.weight.T


model = Model()
optimizers = [
    Muon([model.up.weight, model.down.weight]),
    torch.optim.AdamW([model.embed.weight, *model.norm.parameters()], lr=5e-3, betas=(0.8, 0.95)),
    torch.optim.SGD([model.temperature], lr=1e-3),
]
for step in range(30):
    ids = torch.randint(40, (16, 8))
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ((ids * 3 + 1) % 40).flatten())
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    record(step, model, loss=loss.item())
with torch.no_grad():
    record.end(model(ids), loss=loss)
