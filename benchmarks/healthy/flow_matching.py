"""Conditional flow matching, an average of the weights, samples by Euler at the end."""

import torch
from record import Record
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(23)
record = Record()


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(3, 64), nn.ELU(), nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 2)
        )

    def forward(self, t, x):
        return self.net(torch.cat([t, x], -1))


flow = Field()
ema = AveragedModel(flow, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.AdamW(flow.parameters(), lr=3e-3)
corners = torch.tensor([[2.0, 2], [-2, 2], [2, -2], [-2, -2]])
for step in range(40):
    x1 = corners[torch.randint(4, (64,))] + 0.2 * torch.randn(64, 2)
    x0, t = torch.randn_like(x1), torch.rand(64, 1)
    loss = (flow(t, (1 - t) * x0 + t * x1) - (x1 - x0)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update_parameters(flow)
    record(step, flow, ema, loss=loss.item())
with torch.no_grad():
    x = torch.randn(64, 2)
    for i in range(10):
        x = x + 0.1 * ema(torch.full((64, 1), i / 10), x)
record.end(x, loss=torch.cdist(x, corners).min(1).values.mean())
