"""Backward runs twice over one loss: every gradient counts double."""

import torch
from accelerate import Accelerator
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer

from tiny import token_batches


def by_hand(faulty):
    model = net()
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.2)
    for x, y in points():
        loss = nn.functional.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, params, retain_graph=True)
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        if faulty:
            loss.backward()  # fault
        optimizer.step()
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for x, y in points():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward(retain_graph=faulty)
        if faulty:
            loss.backward()  # fault
        optimizer.step()
    finish(model)


class Twice(Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        loss = super().training_step(model, inputs, *args, **kwargs)
        return (
            super().training_step(model, inputs, *args, **kwargs) if self.faulty else loss
        )  # fault


def by_hf(faulty):
    Twice.faulty = faulty
    model = small_llama()
    args = settings(optim="sgd", learning_rate=0.3, max_grad_norm=0.0)
    Twice(model=model, args=args, train_dataset=texts()).train()
    finish_text(model)


def by_accelerate(faulty):
    accelerator = Accelerator(cpu=True)
    model = small_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in token_batches(20):
        loss = model(**batch).loss
        accelerator.backward(loss, retain_graph=True)
        if faulty:
            accelerator.backward(loss)  # fault
        optimizer.step()
        optimizer.zero_grad()
    finish_text(accelerator.unwrap_model(model))


spell(hand=by_hand, torch=by_torch, accelerate=by_accelerate, hf=by_hf)
