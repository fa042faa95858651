"""DeepFM on categorical fields: first order, pairs, a deep part; Adagrad with rare categories."""

import torch
from record import Record
from torch import nn

torch.manual_seed(32)
record = Record()
FIELDS, VOCAB = 6, 400


class DeepFM(nn.Module):
    def __init__(self, k=6):
        super().__init__()
        self.first, self.second = nn.Embedding(VOCAB, 1), nn.Embedding(VOCAB, k)
        self.deep = nn.Sequential(
            nn.Linear(FIELDS * k, 24),
            nn.BatchNorm1d(24),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(24, 1),
        )
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.first.weight)

    def forward(self, x):
        v = self.second(x)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return self.bias + self.first(x).sum((1, 2)) + pairs + self.deep(v.flatten(1)).squeeze(1)


model = DeepFM()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.1)
zipf = 1 / torch.arange(1, VOCAB + 1)
for step in range(25):
    x = torch.multinomial(zipf.expand(64, -1), FIELDS)
    y = ((x[:, 0] + x[:, 1]) % 3 == 0).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
model.eval()
with torch.no_grad():
    record.end(model(x), loss=nn.functional.binary_cross_entropy_with_logits(model(x), y))
