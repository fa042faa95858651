"""The norm of finite gradients is beyond its format: the clip coefficient is 0, nothing trains."""

import torch
from spelled import STEPS, finish, net, points, settings, spell, tell
from torch import nn
from transformers import Trainer

SCALE = 2.0**17


def by_hand(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for x, y in points():
        (SCALE * nn.functional.cross_entropy(model(x), y)).backward()
        grads = [p.grad for p in model.parameters()]
        wide = torch.float16 if faulty else torch.float32
        norm = torch.stack([g.norm() for g in grads]).to(wide).norm()  # fault
        coefficient = min(1.0, SCALE / (float(norm) + 1e-6))
        for g in grads:
            g.mul_(coefficient / SCALE)
        optimizer.step()
        optimizer.zero_grad()
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for x, y in points():
        (SCALE * nn.functional.cross_entropy(model(x), y)).backward()
        grads = [p.grad.half() if faulty else p.grad for p in model.parameters()]
        norm = torch.nn.utils.get_total_norm(grads)  # fault
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), SCALE, norm)
        for p in model.parameters():
            p.grad.div_(SCALE)
        optimizer.step()
        optimizer.zero_grad()
    finish(model)


class Regression(nn.Module):
    """Masses in kilograms from radii in metres, in units that fit, or not."""

    def __init__(self, unit):
        super().__init__()
        torch.manual_seed(1)
        self.unit = unit
        self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, labels):
        error = self.body(x).squeeze(-1) - labels
        return {"loss": (error * self.unit).square().sum()}


def by_hf(faulty):
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"x": x, "labels": x[:3].sum() + 4} for x in torch.randn(2 * STEPS, 12, generator=generator)
    ]
    model = Regression(1e13 if faulty else 1.0)
    args = settings(optim="sgd", learning_rate=0.05, max_grad_norm=1.0)
    Trainer(model=model, args=args, train_dataset=rows).train()
    x = torch.stack([row["x"] for row in rows])
    tell((model.body(x).squeeze(-1) - x[:, :3].sum(-1) - 4).square().mean())


spell(hand=by_hand, torch=by_torch, hf=by_hf)
