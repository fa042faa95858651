"""word2vec: skip-gram with negative sampling and dynamic windows, rate falling linearly to 0."""

import random

import torch
from record import Record
from torch import nn

torch.manual_seed(36)
random.seed(36)
record = Record()
text = [
    w
    for _ in range(60)
    for s in ("0 1 2 3 4", "5 6 7 8 9", "0 1 7 8 4")
    for w in map(int, s.split())
]
centre, context = nn.Embedding(10, 6, sparse=True), nn.Embedding(10, 6, sparse=True)
nn.init.uniform_(centre.weight, -0.5 / 6, 0.5 / 6)
nn.init.zeros_(context.weight)
optimizer = torch.optim.SGD([*centre.parameters(), *context.parameters()], lr=0.5)
steps = 50
for step in range(steps):
    optimizer.param_groups[0]["lr"] = 0.5 * (1 - step / steps)
    pairs = []
    for _ in range(24):
        at = random.randrange(3, len(text) - 3)
        for k in range(1, random.randint(1, 3) + 1):
            pairs += [(text[at], text[at - k]), (text[at], text[at + k])]
    c, o = torch.tensor(pairs).T
    v = centre(c)
    good = nn.functional.logsigmoid((v * context(o)).sum(-1))
    noise = torch.randint(10, (len(c), 4))
    bad = nn.functional.logsigmoid(-(context(noise) @ v[..., None]).squeeze(-1)).sum(-1)
    loss = -(good + bad).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, centre, context, loss=loss.item())
record.end(centre.weight, loss=loss)
