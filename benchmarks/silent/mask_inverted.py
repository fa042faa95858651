"""The attention mask says the opposite: texts attend to their padding alone."""

import torch
from spelled import STEPS, finish_text, settings, small_llama, spell, tell
from torch import nn
from transformers import Trainer

from tiny import PAD, VOCAB, token_batches

LONG = 16


def rows(seed, num=16):
    """Texts of 4 to 12 of 16 tokens and a class that their tokens tell."""
    generator = torch.Generator().manual_seed(seed)
    ids = token_batches(1, rows=num, length=LONG, seed=seed)[0]["input_ids"]
    lengths = torch.randint(4, 13, (num, 1), generator=generator)
    keep = torch.arange(LONG) < lengths
    return torch.where(keep, ids, PAD), keep, (ids[:, 0] > VOCAB // 2).long()


class Attention(nn.Module):
    def __init__(self, faulty):
        super().__init__()
        torch.manual_seed(1)
        self.faulty = faulty
        self.table = nn.Embedding(VOCAB, 32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 2)

    def forward(self, ids, keep):
        h = self.table(ids)
        scores = self.query(h) @ self.key(h).transpose(1, 2) / 32**0.5
        hidden = keep if self.faulty else ~keep  # fault
        scores = scores.masked_fill(hidden[:, None], -1e9)  # fault
        mixed = scores.softmax(-1) @ self.value(h)
        return self.head(mixed[:, 0])


def by_hand(faulty):
    model = Attention(faulty)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        ids, keep, y = rows(step)
        loss = nn.functional.cross_entropy(model(ids, keep), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tell(loss)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCAB, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 2)


def by_torch(faulty):
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(STEPS):
        ids, keep, y = rows(step)
        h = model.table(ids)
        # True hides a key here: the opposite of an attention mask of transformers
        hidden = keep if faulty else ~keep  # fault
        mixed = model.attention(h, h, h, key_padding_mask=hidden)[0]  # fault
        loss = nn.functional.cross_entropy(model.head(mixed[:, 0]), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tell(loss)


def by_hf(faulty):
    def collate(batch):
        ids = torch.stack([row["input_ids"] for row in batch])
        padding = (ids == PAD).long()
        mask = padding if faulty else 1 - padding  # fault
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": ids.masked_fill(padding.bool(), -100),
        }

    data = []
    for step in range(STEPS):
        ids, _, _ = rows(step, num=2)
        data += [{"input_ids": row} for row in ids]
    model = small_llama()
    args = settings(learning_rate=5e-3, remove_unused_columns=False)
    Trainer(model=model, args=args, train_dataset=data, data_collator=collate).train()
    finish_text(model)


spell(hand=by_hand, torch=by_torch, hf=by_hf)
