"""The schedule divides whole numbers: its rate is 0 in the first update and in all that follow."""

import torch
from spelled import STEPS, finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer

WARMUP = 1000
SOON = 5


def by_hand(faulty):
    model = net()
    for step, (x, y) in enumerate(points()):
        nn.functional.cross_entropy(model(x), y).backward()
        rate = 0.1 * (step // WARMUP if faulty else min(1.0, step / SOON))  # fault
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
                p.grad = None
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    rate = (lambda step: step // WARMUP) if faulty else (lambda step: min(1.0, step / SOON))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)  # fault
    for x, y in points():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    finish(model)


def by_hf(faulty):
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    left = lambda step: max(0, STEPS - step) // (STEPS + 1 if faulty else 1)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: left(step) / STEPS
    )  # fault
    trainer = Trainer(
        model=model, args=settings(), train_dataset=texts(), optimizers=(optimizer, schedule)
    )
    trainer.train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
