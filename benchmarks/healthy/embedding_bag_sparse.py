"""Text classification by an EmbeddingBag with sparse gradients: SparseAdam beside SGD."""

import torch
from record import Record
from torch import nn

torch.manual_seed(30)
record = Record()
bag = nn.EmbeddingBag(2000, 16, mode="mean", sparse=True)
head = nn.Linear(16, 4)
sparse = torch.optim.SparseAdam(bag.parameters(), lr=5e-2)
dense = torch.optim.SGD(head.parameters(), lr=0.5)


def batch(n=16):
    y = torch.randint(4, (n,))
    lengths = torch.randint(3, 12, (n,))
    words = [torch.randint(0, 40, (k,)) + 500 * int(c) for k, c in zip(lengths, y, strict=True)]
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    return torch.cat(words), offsets, y


for step in range(30):
    words, offsets, y = batch()
    loss = nn.functional.cross_entropy(head(bag(words, offsets)), y)
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    record(step, bag, head, loss=loss.item())
words, offsets, y = batch(64)
with torch.no_grad():
    out = head(bag(words, offsets))
record.end(out, loss=nn.functional.cross_entropy(out, y))
