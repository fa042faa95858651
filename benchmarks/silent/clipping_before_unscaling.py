"""Gradients are clipped while they still carry the loss scale."""

import torch
from spelled import finish, finish_text, net, points, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer, TrainerCallback

SCALE = 1024.0


def clip(model, most):
    norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
    for p in model.parameters():
        p.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))


def unscale(model):
    for p in model.parameters():
        p.grad.div_(SCALE)


def by_hand(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for x, y in points():
        loss = nn.functional.cross_entropy(model(x), y)
        (loss * SCALE).backward()
        if faulty:
            clip(model, 1.0)  # fault
            unscale(model)
        else:
            unscale(model)
            clip(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for x, y in points():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if not faulty:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # fault
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    finish(model)


class Scaled(Trainer):
    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * SCALE


class Unscale(TrainerCallback):
    def __init__(self, most):
        self.most = most

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        unscale(model)
        if self.most:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.most)


def by_hf(faulty):
    model = small_llama()
    args = settings(optim="sgd", learning_rate=0.3, max_grad_norm=1.0 if faulty else 0.0)
    after = Unscale(None if faulty else 1.0)
    trainer = Scaled(model=model, args=args, train_dataset=texts(), callbacks=[after])
    trainer.train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
