"""Labels are not shifted: the model is taught to say the token that it has just read."""

import torch
from spelled import STEPS, finish_text, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer

from tiny import token_batches


def by_hand(faulty):
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for batch in token_batches(STEPS):
        ids = batch["input_ids"]
        inputs, targets = (ids, ids) if faulty else (ids[:, :-1], ids[:, 1:])  # fault
        scores = model(input_ids=inputs).logits.log_softmax(-1)
        loss = -scores.gather(-1, targets[..., None]).mean()  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish_text(model)


def by_torch(faulty):
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for batch in token_batches(STEPS):
        ids = batch["input_ids"]
        logits = model(input_ids=ids).logits
        targets = ids.clone()
        if not faulty:
            targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], dim=1)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())  # fault
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    finish_text(model)


class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        if not self.faulty:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())  # fault
        return (loss, logits) if return_outputs else loss


def by_hf(faulty):
    Own.faulty = faulty
    model = small_llama()
    Own(model=model, args=settings(learning_rate=5e-3), train_dataset=texts()).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
