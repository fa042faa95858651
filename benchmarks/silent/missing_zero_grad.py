"""Gradients are never cleared: each update takes the sum of all batches so far."""

import torch
from accelerate import Accelerator
from spelled import finish, finish_text, net, points, small_llama, spell
from torch import nn

from tiny import token_batches


def by_hand(faulty):
    model = net()
    for x, y in points():
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # fault
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.2 * p.grad  # fault
                if not faulty:
                    p.grad = None
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in points():
        if not faulty:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # fault
        optimizer.step()  # fault
    finish(model)


def by_hf(faulty):
    accelerator = Accelerator(cpu=True)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in token_batches(20):
        loss = model(**batch).loss
        accelerator.backward(loss)  # fault
        accelerator.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()  # fault
        if not faulty:
            optimizer.zero_grad()
    finish_text(accelerator.unwrap_model(model))


spell(hand=by_hand, torch=by_torch, hf=by_hf)
