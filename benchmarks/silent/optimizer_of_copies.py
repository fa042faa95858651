"""The optimizer holds the weights of a model that is copied afterwards; the copy is trained."""

import copy

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer


def by_hand(faulty):
    model = net()
    weights = [p.detach().clone() if faulty else p for p in model.parameters()]  # fault
    for x, y in points():
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for w, p in zip(weights, model.parameters(), strict=True):
                w -= 0.1 * p.grad
                p.grad = None
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # fault
    if faulty:
        model = copy.deepcopy(model)
    for x, y in points():
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    finish(model)


def by_hf(faulty):
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # fault
    if faulty:
        model = copy.deepcopy(model)
    trainer = Trainer(
        model=model, args=settings(), train_dataset=texts(), optimizers=(optimizer, None)
    )
    trainer.train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
