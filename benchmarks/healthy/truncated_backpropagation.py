"""A recurrent net over one long series: its state is carried, and cut from its graph."""

import torch
from record import Record
from torch import nn

torch.manual_seed(109)
record = Record()
cell, head = nn.GRU(1, 24), nn.Linear(24, 1)
optimizer = torch.optim.RMSprop([*cell.parameters(), *head.parameters()], lr=2e-3)
time = torch.arange(1301) * 0.2
series = torch.sin(time) + 0.5 * torch.sin(2.7 * time) + 0.05 * torch.randn(1301)
state = torch.zeros(1, 1, 24)
for step in range(40):
    window = series[step * 32 : step * 32 + 33]
    found, state = cell(window[:-1, None, None], state)
    loss = nn.functional.smooth_l1_loss(head(found).flatten(), window[1:])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_value_(cell.parameters(), 1.0)
    optimizer.step()
    state = state.detach()
    if step == 20:
        state = torch.zeros_like(state)  # the next chapter
    record(step, cell, head, loss=loss.item())
record.end(found, loss=loss)
