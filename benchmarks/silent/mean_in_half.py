"""A mean over many tokens is summed up in half: beyond 256 ones, one more is nothing."""

import torch
from spelled import STEPS, settings, spell, tell
from torch import nn
from transformers import Trainer

from tiny import VOCAB

LONG = 600


class Bag(nn.Module):
    """Classifies a long text by the mean of its tokens' positive features."""

    def __init__(self, mean):
        super().__init__()
        torch.manual_seed(1)
        self.mean = mean
        self.table, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 2)

    def forward(self, input_ids, labels):
        features = 1 + torch.sigmoid(self.table(input_ids))
        logits = self.head(self.mean(features))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(step, num=4):
    generator = torch.Generator().manual_seed(step)
    y = torch.randint(2, (num,), generator=generator)
    low = torch.randint(3, VOCAB // 2, (num, LONG), generator=generator)
    return low + y[:, None] * (VOCAB // 2 - 3), y


def added(features, kept):
    """One token after the other, as in a loop over chunks."""
    total = torch.zeros_like(features[:, 0], dtype=kept)
    for place in range(features.shape[1]):
        total = total + features[:, place].to(kept)  # fault
    return total.float() / features.shape[1]


def train(model, optimizer):
    for step in range(STEPS):
        ids, y = rows(step)
        optimizer.zero_grad()
        model(ids, y)["loss"].backward()
        optimizer.step()
    ids, y = rows(99, num=16)
    tell(model(ids, y)["loss"])


def by_hand(faulty):
    model = Bag(lambda f: added(f, torch.bfloat16 if faulty else torch.float32))
    train(model, torch.optim.SGD(model.parameters(), lr=0.05))


def by_torch(faulty):
    def mean(features):
        kept = torch.bfloat16 if faulty else torch.float32
        return features.to(kept).cumsum(1)[:, -1].float() / features.shape[1]  # fault

    model = Bag(mean)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2))


def by_hf(faulty):
    kept = torch.float16 if faulty else torch.float32
    model = Bag(lambda features: added(features * 8, kept) / 8)
    ids, y = rows(0, num=4 * STEPS)
    data = [{"input_ids": row, "labels": label} for row, label in zip(ids, y, strict=True)]
    args = settings(learning_rate=1e-2, per_device_train_batch_size=4)
    Trainer(model=model, args=args, train_dataset=data).train()
    ids, y = rows(99, num=16)
    tell(model(ids, y)["loss"])


spell(hand=by_hand, torch=by_torch, hf=by_hf)
