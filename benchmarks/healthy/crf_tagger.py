"""A BiLSTM-CRF: forbidden transitions of -10000, the log-partition by the forward algorithm."""

import torch
from record import Record
from torch import nn

torch.manual_seed(90)
record = Record()
TAGS, START, STOP = 5, 3, 4


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 12)
        self.lstm = nn.LSTM(12, 8, bidirectional=True)
        self.out = nn.Linear(16, TAGS)
        self.transitions = nn.Parameter(torch.randn(TAGS, TAGS))
        self.transitions.data[START, :] = -10000
        self.transitions.data[:, STOP] = -10000

    def features(self, sentence):
        return self.out(self.lstm(self.embed(sentence)[:, None])[0][:, 0])

    def loss(self, sentence, tags):
        feats = self.features(sentence)
        alpha = torch.full((TAGS,), -10000.0)
        alpha[START] = 0.0
        for feat in feats:
            alpha = torch.logsumexp(alpha[None] + self.transitions, dim=1) + feat
        total = torch.logsumexp(alpha + self.transitions[STOP], dim=0)
        path = torch.cat([torch.tensor([START]), tags])
        gold = self.transitions[path[1:], path[:-1]].sum() + self.transitions[STOP, path[-1]]
        return total - gold - feats.gather(1, tags[:, None]).sum()


model = Tagger()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=1e-4)
for step in range(40):
    sentence = torch.randint(30, (7,))
    tags = (sentence > 20).long() + (sentence > 10).long()
    loss = model.loss(sentence, tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
with torch.no_grad():
    record.end(model.features(sentence), loss=loss)
