"""In three of four batches every label is masked, for their texts have another template."""

import torch
from spelled import STEPS, finish_text, settings, small_llama, spell
from torch import nn
from transformers import Trainer

from tiny import VOCAB, token_batches

MARK, OTHER = VOCAB - 1, VOCAB - 2
"""The token that begins an answer, and the one by which other texts begin theirs."""


def batches():
    found = []
    for number, batch in enumerate(token_batches(STEPS)):
        ids = batch["input_ids"]
        ids[:, 6] = OTHER if number % 4 else MARK
        found.append(ids)
    return found


def masked(ids, faulty):
    """Labels of the answer only: what comes after the mark."""
    begins = (ids == MARK) if faulty else (ids == MARK) | (ids == OTHER)
    answer = begins.long().cumsum(1) > 0
    return ids.masked_fill(~answer, -100)  # fault


def by_hand(faulty):
    model = small_llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for ids in batches():
        labels = masked(ids, faulty)[:, 1:]
        kept = labels != -100
        scores = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        chosen = scores.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        loss = -(chosen * kept).sum() / kept.sum().clamp(min=1)  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish_text(model)


def by_torch(faulty):
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for ids in batches():
        labels = masked(ids, faulty)[:, 1:].flatten()
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss = total / max(int((labels >= 0).sum()), 1)  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish_text(model)


class Answers(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        ids = inputs["input_ids"]
        labels = masked(ids, self.faulty)[:, 1:].flatten()
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        total = nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss = total / (labels != -100).sum().clamp(min=1)  # fault
        return (loss, logits) if return_outputs else loss


def by_hf(faulty):
    Answers.faulty = faulty
    model = small_llama()
    rows = [{"input_ids": row, "labels": row} for ids in batches() for row in ids]
    args = settings(learning_rate=3e-3)
    Answers(model=model, args=args, train_dataset=rows).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
