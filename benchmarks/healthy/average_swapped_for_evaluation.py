"""An average of the weights is put in for each evaluation, and the trained ones back after it."""

import torch
from record import Record
from torch import nn

torch.manual_seed(99)
record = Record()


class EMA:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.shadow = {k: p.detach().clone() for k, p in model.named_parameters()}

    def update(self):
        for k, p in self.model.named_parameters():
            self.shadow[k] = self.decay * self.shadow[k] + (1 - self.decay) * p.detach()

    def __enter__(self):
        self.backup = {k: p.data for k, p in self.model.named_parameters()}
        for k, p in self.model.named_parameters():
            p.data = self.shadow[k]

    def __exit__(self, *exc):
        for k, p in self.model.named_parameters():
            p.data = self.backup[k]


model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
ema, centres = EMA(model), torch.randn(4, 12)
for step in range(40):
    y = torch.randint(4, (24,))
    loss = nn.functional.cross_entropy(model(centres[y] + torch.randn(24, 12)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()
    if step % 5 == 4:
        model.eval()
        with ema, torch.no_grad():
            score = nn.functional.cross_entropy(model(centres), torch.arange(4))
        model.train()
        print(f"step {step}: {score:.4f}")
    record(step, model, loss=loss.item())
with ema, torch.no_grad():
    record.end(model(centres), loss=score)
