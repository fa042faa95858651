"""Squares of small gradients are 0 in half: an Adam with half moments takes far too long steps."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer

EPS = 1e-6


def by_hand(faulty):
    model = net()
    kept = torch.float16 if faulty else torch.float32
    first = [torch.zeros_like(p, dtype=kept) for p in model.parameters()]
    second = [torch.zeros_like(p, dtype=kept) for p in model.parameters()]
    for t, (x, y) in enumerate(points(), start=1):
        (1e-3 * nn.functional.cross_entropy(model(x), y)).backward()
        with torch.no_grad():
            for p, m, v in zip(model.parameters(), first, second, strict=True):
                m.mul_(0.9).add_(p.grad.to(kept), alpha=0.1)
                v.mul_(0.999).add_(p.grad.to(kept).square(), alpha=0.001)  # fault
                mean, square = m.float() / (1 - 0.9**t), v.float() / (1 - 0.999**t)
                p -= 1e-2 * mean / (square.sqrt() + EPS)  # fault
                p.grad = None
    finish(model)


def by_torch(faulty):
    model = net().to(torch.float16 if faulty else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=EPS)
    for x, y in points():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)
        (1e-3 * loss).backward()
        optimizer.step()  # fault
    finish(model)


def by_hf(faulty):
    model = small_llama().to(torch.float16 if faulty else torch.float32)
    args = settings(learning_rate=1e-3, adam_epsilon=EPS, max_grad_norm=1e-2)
    Trainer(model=model, args=args, train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
