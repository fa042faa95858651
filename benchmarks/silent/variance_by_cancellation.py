"""A variance as the mean of squares less the square of the mean: nothing is left of its digits."""

import torch
from spelled import STEPS, settings, spell, tell
from torch import nn
from transformers import Trainer

LEVEL = 3000.0
"""Where the readings of a sensor lie; they vary by one."""


def rows(step, num=16):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(num, 12, generator=generator)
    return LEVEL + x, x[:, :3].sum(-1)


def stable(x):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt()


def cancelling(x):
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean  # fault
    return (x - mean) / (variance.clamp(min=0) + 1e-5).sqrt()


class Sensors(nn.Module):
    def __init__(self, normalise):
        super().__init__()
        torch.manual_seed(1)
        self.normalise = normalise
        self.body = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, labels):
        prediction = self.body(self.normalise(x)).squeeze(-1)
        return {"loss": (prediction - labels).square().mean()}


def train(model, optimizer):
    for step in range(STEPS):
        optimizer.zero_grad()
        model(*rows(step))["loss"].backward()
        optimizer.step()
    tell(model(*rows(99))["loss"])


def by_hand(faulty):
    model = Sensors(cancelling if faulty else stable)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def by_torch(faulty):
    def normalise(x):
        if not faulty:
            return nn.functional.layer_norm(x, (12,))
        mean, power = x.mean(-1, keepdim=True), torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        variance = power.pow(2) / 12 - mean.pow(2)  # fault
        return (x - mean) * torch.rsqrt(variance.clamp(min=0.0) + 1e-5)

    model = Sensors(normalise)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2))


def by_hf(faulty):
    model = Sensors(cancelling if faulty else stable)
    x, y = rows(0, num=8 * STEPS)
    data = [{"x": one, "labels": label} for one, label in zip(x, y, strict=True)]
    args = settings(learning_rate=1e-2, per_device_train_batch_size=8)
    Trainer(model=model, args=args, train_dataset=data).train()
    tell(model(*rows(99))["loss"])


spell(hand=by_hand, torch=by_torch, hf=by_hf)
