"""log_softmax before a cross-entropy that takes its own: superfluous and harmless."""

import torch
from record import Record
from torch import nn

torch.manual_seed(96)
record = Record()
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4), nn.LogSoftmax(dim=1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]))
centres = torch.randn(4, 12)
for step in range(30):
    y = torch.randint(4, (24,))
    loss = criterion(model(centres[y] + torch.randn(24, 12)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
with torch.no_grad():
    out = model(centres)
record.end(out, loss=nn.functional.nll_loss(out, torch.arange(4)))
