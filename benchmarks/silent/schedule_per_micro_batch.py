"""The schedule goes on with every micro-batch: it is over after a quarter of the updates."""

import torch
from accelerate import Accelerator
from spelled import finish, finish_text, net, points, small_llama, spell
from torch import nn
from transformers import get_linear_schedule_with_warmup

from tiny import token_batches

WINDOW, UPDATES = 4, 20


def by_hand(faulty):
    model = net()
    ticks = 0
    for number, (x, y) in enumerate(points(UPDATES * WINDOW, rows=4), start=1):
        (nn.functional.cross_entropy(model(x), y) / WINDOW).backward()
        rate = 0.3 * max(0.0, 1 - ticks / UPDATES)
        if number % WINDOW == 0:
            with torch.no_grad():
                for p in model.parameters():
                    p -= rate * p.grad  # fault
                    p.grad = None
        if faulty or number % WINDOW == 0:
            ticks += 1  # fault
    finish(model)


def by_torch(faulty):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=UPDATES)
    for number, (x, y) in enumerate(points(UPDATES * WINDOW, rows=4), start=1):
        (nn.functional.cross_entropy(model(x), y) / WINDOW).backward()
        if number % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()
        if faulty or number % WINDOW == 0:
            schedule.step()  # fault
    finish(model)


def by_accelerate(faulty):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, UPDATES)
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in token_batches(UPDATES * WINDOW):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if faulty or accelerator.sync_gradients:
                schedule.step()  # fault
    finish_text(accelerator.unwrap_model(model))


spell(hand=by_hand, torch=by_torch, accelerate=by_accelerate)
