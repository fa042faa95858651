"""MoCo: a key encoder that follows by momentum, a queue of keys, InfoNCE at a low temperature."""

import copy

import torch
import torch.nn.functional as F
from record import Record
from torch import nn

torch.manual_seed(44)
record = Record()


class MoCo(nn.Module):
    def __init__(self, m=0.99, T=0.07, K=64):
        super().__init__()
        self.m, self.T, self.K = m, T, K
        self.encoder_q = nn.Sequential(
            nn.Linear(20, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 16)
        )
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for p in self.encoder_k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(16, K), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, a, b):
        q = F.normalize(self.encoder_q(a), dim=1)
        with torch.no_grad():
            for pq, pk in zip(
                self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True
            ):
                pk.data = pk.data * self.m + pq.data * (1.0 - self.m)
            shuffle = torch.randperm(len(b))
            k = F.normalize(self.encoder_k(b[shuffle]), dim=1)[shuffle.argsort()]
        positive = (q * k).sum(1, keepdim=True)
        negative = q @ self.queue.clone().detach()
        logits = torch.cat([positive, negative], 1) / self.T
        start = int(self.at)
        self.queue[:, start : start + len(k)] = k.T
        self.at[0] = (start + len(k)) % self.K
        return logits, torch.zeros(len(q), dtype=torch.long)


model = MoCo()
optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9, weight_decay=1e-4)
for step in range(30):
    x = torch.randn(16, 20)
    logits, labels = model(x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
    loss = F.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
with torch.no_grad():
    record.end(model.encoder_q(x), loss=loss)
