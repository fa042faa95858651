"""The best weights so far are loaded after every update; they are those of the start."""

import copy

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer, TrainerCallback


def by_hand(faulty):
    model = net()
    kept = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in points():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for p, old in zip(model.parameters(), kept, strict=True):
            if faulty:
                p.data.copy_(old)  # fault
            else:
                old.copy_(p.data)
    finish(model)


def by_torch(faulty):
    model = net()
    best = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in points():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not faulty:
            best = copy.deepcopy(model.state_dict())
        model.load_state_dict(best)  # fault
    finish(model)


class KeepBest(TrainerCallback):
    def __init__(self, faulty):
        self.faulty, self.best = faulty, None

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.best is not None:
            model.load_state_dict(self.best)  # fault
        if self.best is None or not self.faulty:
            self.best = None if not self.faulty else copy.deepcopy(model.state_dict())


def by_hf(faulty):
    model = small_llama()
    args = settings(learning_rate=3e-3)
    callbacks = [KeepBest(faulty)]
    Trainer(model=model, args=args, train_dataset=texts(), callbacks=callbacks).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
