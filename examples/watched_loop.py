"""The same loop with nanstop's own two calls: `python watched_loop.py`, without `nanstop run`."""

import torch
from torch import nn

import nanstop

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
teacher = torch.randn(16, 4)


def loss_of(x: torch.Tensor) -> torch.Tensor:
    """Return the loss of one batch."""
    return nn.functional.cross_entropy(model(x), (x @ teacher).argmax(-1))


with nanstop.watch(model, optimizer) as watch:
    for step in range(40):
        loss = watch.step(loss_of, torch.randn(32, 16))  # the loss and its backward
        watch.update(clip=1.0)  # look, clip, optimizer step, zero_grad
print(f"loss {loss.item():.3f}; incidents: {len(watch.incidents)}")
