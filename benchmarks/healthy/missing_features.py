"""Tabular data with gaps: NaN in the input is replaced by 0 and told by a mask, as is usual."""

import torch
from record import Record
from torch import nn

torch.manual_seed(95)
record = Record()


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.category = nn.Embedding(10, 4)
        self.net = nn.Sequential(
            nn.Linear(6 + 6 + 4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
        )

    def forward(self, x, c):
        known = ~x.isnan()
        x = torch.nan_to_num(x)
        return self.net(torch.cat([x, known.float(), self.category(c)], 1)).squeeze(1)


model = Tabular()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(30):
    x, c = torch.randn(48, 6), torch.randint(10, (48,))
    y = x[:, 0] - x[:, 1] + c / 5
    x[torch.rand_like(x) < 0.2] = float("nan")
    loss = nn.functional.smooth_l1_loss(model(x, c), y, beta=0.5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    record(step, model, loss=loss.item())
model.eval()
with torch.no_grad():
    record.end(model(x, c), loss=nn.functional.mse_loss(model(x, c), y))
