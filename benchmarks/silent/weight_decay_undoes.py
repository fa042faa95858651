"""Weight decay takes away half of every weight with each update: nothing that is learned stays."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer


def by_hand(faulty):
    model = net()
    decay = 10.0 if faulty else 0.01
    for x, y in points():
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * (p.grad + decay * p)  # fault
                p.grad = None
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=50.0 if faulty else 0.05
    )
    for x, y in points():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()  # fault
    finish(model)


def by_hf(faulty):
    model = small_llama()
    args = settings(learning_rate=3e-3, weight_decay=150.0 if faulty else 0.1)
    Trainer(model=model, args=args, train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
