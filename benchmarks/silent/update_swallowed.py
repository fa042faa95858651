"""Gradients are there, the update never reaches the weights."""

import torch
from accelerate import Accelerator
from spelled import finish, finish_text, net, points, small_llama, spell
from torch import nn

from tiny import token_batches


def by_hand(faulty):
    model = net()
    for x, y in points():
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                if faulty:
                    p = p - 0.1 * p.grad  # fault
                else:
                    p -= 0.1 * p.grad
        model.zero_grad()
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in points():
        nn.functional.cross_entropy(model(x), y).backward()
        if faulty:
            optimizer.zero_grad()  # fault
        optimizer.step()
        optimizer.zero_grad()
    finish(model)


def by_hf(faulty):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1000 if faulty else 1)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in token_batches(40):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()  # fault
            optimizer.zero_grad()
    finish_text(accelerator.unwrap_model(model))


spell(hand=by_hand, torch=by_torch, hf=by_hf)
