"""An optimizer for each parameter, stepped in the hook that runs when its gradient is there."""

import torch
from record import Record
from torch import nn

torch.manual_seed(77)
record = Record()
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
optimizers = {p: torch.optim.Adam([p], lr=5e-3) for p in model.parameters()}


def step_now(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)
centres = torch.randn(4, 12)
for step in range(30):
    y = torch.randint(4, (24,))
    loss = nn.functional.cross_entropy(model(centres[y] + torch.randn(24, 12)), y)
    loss.backward()
    record(step, model, loss=loss.item())
with torch.no_grad():
    out = model(centres)
record.end(out, loss=nn.functional.cross_entropy(out, torch.arange(4)))
