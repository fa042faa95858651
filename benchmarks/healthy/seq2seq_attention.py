"""Translation of reversed numbers: teacher forcing by chance, padded targets, dot attention."""

import random

import torch
from record import Record
from torch import nn

torch.manual_seed(102)
record = Record()
PAD, GO = 0, 1


class Seq2Seq(nn.Module):
    def __init__(self, vocab=14, dim=24):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.encoder, self.decoder = nn.GRU(dim, dim, batch_first=True), nn.GRUCell(dim, dim)
        self.out = nn.Linear(2 * dim, vocab)

    def forward(self, source, target, forcing):
        memory, state = self.encoder(self.embed(source))
        state, word, outs = state[0], torch.full((len(source),), GO), []
        for t in range(target.shape[1]):
            state = self.decoder(self.embed(word), state)
            scores = (memory @ state[..., None]).squeeze(-1).masked_fill(source == PAD, -1e9)
            mixed = (scores.softmax(-1)[:, None] @ memory).squeeze(1)
            outs.append(self.out(torch.cat([state, mixed], 1)))
            word = target[:, t] if random.random() < forcing else outs[-1].argmax(1)
        return torch.stack(outs, 2)


def batch(n=16):
    lengths = torch.randint(3, 7, (n, 1))
    ids = torch.randint(2, 14, (n, 6)) * (torch.arange(6) < lengths)
    back = (lengths - 1 - torch.arange(6)).clamp(min=0)
    return ids, ids.gather(1, back) * (torch.arange(6) < lengths)


model, criterion = Seq2Seq(), nn.CrossEntropyLoss(ignore_index=PAD)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for step in range(30):
    source, target = batch()
    loss = criterion(model(source, target, forcing=0.5), target)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1)
    optimizer.step()
    record(step, model, loss=loss.item())
source, target = batch()
with torch.no_grad():
    out = model(source, target, 1.0)
record.end(out, loss=criterion(out, target))
