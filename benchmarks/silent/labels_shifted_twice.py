"""Labels are shifted by the data and again by the loss: tokens predict the one after next."""

import torch
from spelled import STEPS, finish_text, settings, small_llama, spell, texts
from torch import nn
from transformers import Trainer

from tiny import VOCAB, token_batches


class Bigram(nn.Module):
    """A model of the next token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table, self.head = nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB)

    def forward(self, ids):
        return self.head(self.table(ids))


def evaluate(model):
    from spelled import tell

    ids = token_batches(1, rows=8, seed=7)[0]["input_ids"]
    tell(nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def by_hand(faulty):
    model = Bigram()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for batch in token_batches(STEPS, rows=8):
        inputs, targets = batch["input_ids"][:, :-1], batch["input_ids"][:, 1:]
        logits = model(inputs)
        if faulty:
            logits, targets = logits[:, :-1], targets[:, 1:]  # fault
        chosen = logits.log_softmax(-1).gather(-1, targets[..., None])
        optimizer.zero_grad()
        (-chosen.mean()).backward()
        optimizer.step()
    evaluate(model)


def by_torch(faulty):
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for batch in token_batches(STEPS):
        labels = batch["labels"]
        if faulty:
            labels = torch.cat(
                [labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1
            )  # fault
        optimizer.zero_grad()
        loss = model(batch["input_ids"], labels=labels).loss  # fault
        loss.backward()
        optimizer.step()
    finish_text(model)


def by_hf(faulty):
    def collate(rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        labels = ids.clone()
        if faulty:
            labels[:, :-1] = ids[:, 1:]  # fault
            labels[:, -1] = -100
        return {"input_ids": ids, "labels": labels}

    model = small_llama()
    args = settings(learning_rate=5e-3)
    Trainer(model=model, args=args, train_dataset=texts(), data_collator=collate).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
