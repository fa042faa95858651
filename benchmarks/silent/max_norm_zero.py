"""Clipping is meant to be off; the norm is clipped to 0 and nothing trains."""

import torch
from accelerate import Accelerator
from spelled import finish, finish_text, net, points, small_llama, spell
from torch import nn

from tiny import token_batches


def by_hand(faulty):
    model = net()
    most = 0.0 if faulty else 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for x, y in points():
        nn.functional.cross_entropy(model(x), y).backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_(min(1.0, most / float(norm)))  # fault
        optimizer.step()
        optimizer.zero_grad()
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in points():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.0 if faulty else 1.0)  # fault
        optimizer.step()
    finish(model)


def by_hf(faulty):
    accelerator = Accelerator(cpu=True)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    most = 0.0 if faulty else 1.0
    for batch in token_batches(20):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), most)  # fault
        optimizer.step()
        optimizer.zero_grad()
    finish_text(accelerator.unwrap_model(model))


spell(hand=by_hand, torch=by_torch, hf=by_hf)
