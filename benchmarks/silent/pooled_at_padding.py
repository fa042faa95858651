"""The last place of a row is taken as the text's state; the rows are padded there."""

import torch
from spelled import STEPS, settings, spell, tell
from torch import nn
from transformers import LlamaModel, Trainer

from tiny import PAD, VOCAB, llama, token_batches

LONG = 16


def rows(num):
    """Texts of 4 to 16 tokens, padded on the right, each with a class that its tokens tell."""
    generator = torch.Generator().manual_seed(num)
    ids = token_batches(1, rows=num, length=LONG, seed=num)[0]["input_ids"]
    lengths = torch.randint(4, LONG + 1, (num,), generator=generator)
    mask = (torch.arange(LONG) < lengths[:, None]).long()
    return ids * mask + PAD * (1 - mask), mask, (ids[:, 0] > VOCAB // 2).long()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(VOCAB, 16, padding_idx=PAD)
        self.cell = nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 2)


def by_hand(faulty):
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(STEPS):
        ids, mask, y = rows(16 + step)
        states = model.cell(model.table(ids))[0]
        last = torch.full_like(y, LONG - 1) if faulty else mask.sum(1) - 1
        pooled = states[torch.arange(len(y)), last]  # fault
        loss = nn.functional.cross_entropy(model.head(pooled), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tell(loss)


def by_torch(faulty):
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        ids, mask, y = rows(16 + step)
        embedded = model.table(ids)
        if not faulty:
            embedded = nn.utils.rnn.pack_padded_sequence(
                embedded, mask.sum(1), batch_first=True, enforce_sorted=False
            )
        final = model.cell(embedded)[1][0]  # fault
        loss = nn.functional.cross_entropy(model.head(final), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tell(loss)


class Reward(nn.Module):
    """A body of transformers and a score of the last token, as in a reward model of one's own."""

    def __init__(self, faulty):
        super().__init__()
        torch.manual_seed(1)
        self.faulty = faulty
        self.body = LlamaModel(llama(num_hidden_layers=1).config)
        self.score = nn.Linear(64, 2)

    def forward(self, input_ids, attention_mask, labels):
        states = self.body(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.faulty:
            pooled = states[:, -1]  # fault
        else:
            pooled = states[torch.arange(len(labels)), attention_mask.sum(1) - 1]
        logits = self.score(pooled)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def by_hf(faulty):
    ids, mask, y = rows(8 * STEPS)
    data = [
        {"input_ids": i, "attention_mask": m, "labels": label}
        for i, m, label in zip(ids, mask, y, strict=True)
    ]
    model = Reward(faulty)
    args = settings(learning_rate=3e-3, per_device_train_batch_size=8)
    Trainer(model=model, args=args, train_dataset=data).train()
    tell(model.eval()(ids, mask, y)["loss"])


spell(hand=by_hand, torch=by_torch, hf=by_hf)
