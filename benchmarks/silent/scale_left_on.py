"""The loss is scaled for half precision; the optimizer gets the gradients scaled."""

import torch
from accelerate import Accelerator
from spelled import finish, finish_text, net, points, small_llama, spell
from torch import nn

from tiny import token_batches

SCALE = 64.0


def by_hand(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for x, y in points():
        loss = nn.functional.cross_entropy(model(x), y)
        (loss * SCALE).backward()
        if not faulty:
            for p in model.parameters():
                p.grad /= SCALE
        optimizer.step()  # fault
        optimizer.zero_grad()
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for x, y in points():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if faulty:
            optimizer.step()  # fault
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    finish(model)


def by_hf(faulty):
    accelerator = Accelerator(cpu=True)
    model = small_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in token_batches(20):
        loss = model(**batch).loss
        accelerator.backward(loss * SCALE)
        if not faulty:
            for p in model.parameters():
                p.grad.mul_(1 / SCALE)
        optimizer.step()  # fault
        optimizer.zero_grad()
    finish_text(accelerator.unwrap_model(model))


spell(hand=by_hand, torch=by_torch, hf=by_hf)
