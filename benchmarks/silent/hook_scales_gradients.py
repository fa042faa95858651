"""A hook that was left from an experiment makes every gradient a thousand times smaller."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer

norms = []


def watch(grad):
    norms.append(float(grad.norm()))


def by_hand(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in points():
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        for p in model.parameters():
            watch(p.grad)
            if faulty:
                p.grad = p.grad * 1e-3  # fault
        optimizer.step()
        optimizer.zero_grad()
    finish(model)


def by_torch(faulty):
    model = net()
    for p in model.parameters():
        p.register_hook((lambda g: g * 1e-3) if faulty else watch)  # fault
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in points():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    finish(model)


def by_hf(faulty):
    model = small_llama()

    def after(p):
        watch(p.grad)
        if faulty:
            p.grad.mul_(1e-3)  # fault

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(after)
    args = settings(optim="sgd", learning_rate=0.5)
    Trainer(model=model, args=args, train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
