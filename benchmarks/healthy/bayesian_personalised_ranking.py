"""Matrix factorisation under BPR: one negative a positive, only the rows that are met move."""

import torch
from record import Record
from torch import nn

torch.manual_seed(31)
record = Record()
users, items = nn.Embedding(300, 8, sparse=True), nn.Embedding(500, 8, sparse=True)
nn.init.normal_(users.weight, std=0.1)
nn.init.normal_(items.weight, std=0.1)
optimizer = torch.optim.SGD([*users.parameters(), *items.parameters()], lr=1.0)
for step in range(40):
    u = torch.randint(300, (32,))
    liked = (u % 10) * 50 + torch.randint(50, (32,))
    other = torch.randint(500, (32,))
    vectors = users(u)
    gap = (vectors * (items(liked) - items(other))).sum(-1)
    loss = -nn.functional.logsigmoid(gap).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, users, items, loss=loss.item())
with torch.no_grad():
    record.end(users.weight @ items.weight.T, loss=loss)
