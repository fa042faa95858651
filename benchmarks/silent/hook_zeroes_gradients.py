"""Layers are to be frozen for three updates; their gradients are set to zero for good."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer, TrainerCallback

FROZEN = 3


def by_hand(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(points()):
        nn.functional.cross_entropy(model(x), y).backward()
        if faulty or step < FROZEN:
            for p in model.parameters():
                p.grad.zero_()  # fault
        optimizer.step()
        optimizer.zero_grad()
    finish(model)


def by_torch(faulty):
    model = net()
    hooks = [p.register_hook(torch.zeros_like) for p in model.parameters()]  # fault
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(points()):
        if step == FROZEN and not faulty:
            for hook in hooks:
                hook.remove()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    finish(model)


class Freeze(TrainerCallback):
    def __init__(self, until):
        self.until = until

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step < self.until:
            for p in model.parameters():
                p.grad.zero_()  # fault


def by_hf(faulty):
    model = small_llama()
    freeze = Freeze(10**6 if faulty else FROZEN)
    args = settings(learning_rate=3e-3)
    Trainer(model=model, args=args, train_dataset=texts(), callbacks=[freeze]).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
