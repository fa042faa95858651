"""Warm-up takes 200,000 updates, the run has 20."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer

FAR, NEAR = 200_000, 4


def by_hand(faulty):
    model = net()
    warmup = FAR if faulty else NEAR
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step, (x, y) in enumerate(points(), start=1):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, step / warmup)  # fault
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    warmup = FAR if faulty else NEAR
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-4, total_iters=warmup)  # fault
    for x, y in points():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    finish(model)


def by_hf(faulty):
    model = small_llama()
    args = settings(learning_rate=3e-3, warmup_steps=FAR if faulty else NEAR)
    Trainer(model=model, args=args, train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
