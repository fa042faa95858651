"""Prompt tuning: a frozen transformer in eval mode, five trained vectors before each text."""

import torch
from record import Record
from torch import nn

torch.manual_seed(72)
record = Record()
layer = nn.TransformerEncoderLayer(24, 3, 48, batch_first=True)
body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval().requires_grad_(False)
embed = nn.Embedding(30, 24).requires_grad_(False)
prompt = nn.Parameter(torch.randn(5, 24) * 0.5)
words = torch.tensor([3, 17])  # the verbaliser: what is said for no and for yes
optimizer = torch.optim.Adafactor([prompt], lr=0.3)
for step in range(30):
    ids = torch.randint(30, (16, 6))
    y = (ids[:, 0] > 14).long()
    h = body(torch.cat([prompt.expand(16, -1, -1), embed(ids)], 1))
    logits = h[:, 0] @ embed(words).T
    loss = nn.functional.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, body, embed, loss=loss.item())
record.end(prompt, loss=loss)
