"""Accumulation over four micro-batches; gradients are cleared at the start of each."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer

WINDOW = 4


def by_hand(faulty):
    model = net()
    for number, (x, y) in enumerate(points(20 * WINDOW, rows=4)):
        if faulty or number % WINDOW == 0:
            for p in model.parameters():
                p.grad = None  # fault
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / WINDOW).backward()
        if number % WINDOW == WINDOW - 1:
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(p.grad, alpha=-0.3)
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for number, (x, y) in enumerate(points(20 * WINDOW, rows=4), start=1):
        if faulty or number % WINDOW == 1:
            optimizer.zero_grad()  # fault
        loss = nn.functional.cross_entropy(model(x), y)
        (loss / WINDOW).backward()
        if number % WINDOW == 0:
            optimizer.step()
    finish(model)


class Clearing(Trainer):
    faulty = True

    def training_step(self, model, *args, **kwargs):
        model.train()
        if self.faulty:
            model.zero_grad()  # fault
        return super().training_step(model, *args, **kwargs)


def by_hf(faulty):
    model = small_llama()
    Clearing.faulty = faulty
    args = settings(gradient_accumulation_steps=WINDOW, optim="sgd", learning_rate=0.5)
    Clearing(model=model, args=args, train_dataset=texts(20 * WINDOW)).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
