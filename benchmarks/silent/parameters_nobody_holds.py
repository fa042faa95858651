"""The head is replaced after the optimizer was made: its gradients are used by nobody."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer


def by_hand(faulty):
    model = net()
    held = list(model.parameters())  # fault
    model[-1] = nn.Linear(32, 4)
    if not faulty:
        held = list(model.parameters())
    for x, y in points():
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p in held:
                if p.grad is not None:
                    p -= 0.1 * p.grad
        model.zero_grad()
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)  # fault
    model[-1] = nn.Linear(32, 4)
    if not faulty:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in points():
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    finish(model)


def by_hf(faulty):
    model = small_llama(tie_word_embeddings=False)
    held = model.model if faulty else model
    optimizer = torch.optim.AdamW(held.parameters(), lr=3e-3)  # fault
    trainer = Trainer(
        model=model, args=settings(), train_dataset=texts(), optimizers=(optimizer, None)
    )
    trainer.train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
