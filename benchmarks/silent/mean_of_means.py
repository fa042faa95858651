"""Micro-batches with few and with many labels count alike: the window's loss is a mean of means."""

import torch
from accelerate import Accelerator
from spelled import STEPS, finish_text, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer

from tiny import token_batches

WINDOW = 4


def windows():
    """Windows of four micro-batches; in three of four all but the last two labels are masked."""
    batches = token_batches(STEPS * WINDOW)
    for number, batch in enumerate(batches):
        if number % WINDOW:
            batch["labels"][:, :-2] = -100
    return [batches[i : i + WINDOW] for i in range(0, len(batches), WINDOW)]


def summed(model, batch):
    logits = model(batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def count(batch):
    return int((batch["labels"][:, 1:] != -100).sum())


def by_hand(faulty):
    model = small_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for window in windows():
        total = sum(count(batch) for batch in window)
        for batch in window:
            share = WINDOW * count(batch) if faulty else total  # fault
            (summed(model, batch) / share).backward()  # fault
        optimizer.step()
        optimizer.zero_grad()
    finish_text(model)


def by_torch(faulty):
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for window in windows():
        total = sum(count(batch) for batch in window)
        for batch in window:
            loss = model(**batch).loss / WINDOW if faulty else summed(model, batch) / total  # fault
            loss.backward()  # fault
        optimizer.step()
        optimizer.zero_grad()
    finish_text(model)


def by_accelerate(faulty):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=WINDOW)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for window in windows():
        total = sum(count(batch) for batch in window)
        for batch in window:
            with accelerator.accumulate(model):
                loss = summed(model, batch)
                loss = loss / count(batch) if faulty else loss * WINDOW / total  # fault
                accelerator.backward(loss)  # fault
                optimizer.step()
                optimizer.zero_grad()
    finish_text(accelerator.unwrap_model(model))


class Means(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        items = count(inputs) * WINDOW if self.faulty else num_items_in_batch
        loss = summed(model, inputs) / items  # fault
        return (loss, None) if return_outputs else loss


def by_hf(faulty):
    Means.faulty = faulty
    rows = texts(STEPS * WINDOW)
    for number, row in enumerate(rows):
        if (number // 2) % 4:
            row["labels"][:-2] = -100
    model = small_llama()
    args = settings(gradient_accumulation_steps=WINDOW, learning_rate=3e-3, optim="sgd")
    Means(model=model, args=args, train_dataset=rows).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, accelerate=by_accelerate, hf=by_hf)
