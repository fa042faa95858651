"""Planted faults of resolution: nothing leaves its range, or only once the optimizer has divided by zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanstop.faults.parts import WIDTH, Model, diagonal, ones
from nanstop.faults.specimen import Batch, Specimen

NUM_POSITIONS = 320


def small_gradients(stored: torch.dtype) -> Specimen:
    """AdamW with its usual eps on a head in ``stored`` whose gradient is 0.001: eps and the square are 0 in float16."""
    head = nn.Linear(WIDTH, 1).to(stored)
    nn.init.constant_(head.weight, 0.5)
    model = Model(head=head)

    def loss_fn(batch: Batch) -> Tensor:
        return model(batch["x"].to(stored)).float().mean() * 1e-3

    return Specimen(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_fn=loss_fn,
        batches=({"x": ones()},),
    )


def small_steps(stored: torch.dtype) -> Specimen:
    """AdamW with a learning rate of 1e-6 on weights like those of a pretrained model, stored in ``stored``."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False)
    nn.init.normal_(layer.weight, std=0.02)
    model = Model(layer=layer).to(stored)
    return Specimen(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-6),
        loss_fn=lambda batch: model(batch["x"].to(stored)).float().pow(2).mean(),
        batches=({"x": torch.randn(16, 64)},),
    )


class Positions(nn.Module):
    """Adds the cosines of positions that are counted in ``counted`` to a layer's answer."""

    def __init__(self, counted: torch.dtype) -> None:
        super().__init__()
        self.counted = counted
        self.layer = diagonal(1.0)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).to(self.counted)
        frequencies = torch.logspace(0, -2, WIDTH, device=x.device).to(self.counted)
        return self.layer(x) + torch.cos(positions[:, None] * frequencies).to(x.dtype)


def counted_positions(counted: torch.dtype) -> Specimen:
    """A float32 model that counts 320 positions in ``counted``."""
    model = Model(rotary=Positions(counted))
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean(),
        batches=({"x": ones(rows=1, tokens=NUM_POSITIONS)},),
    )


def weighted_loss(weight: float) -> Specimen:
    """A mean over 192 numbers in float16, multiplied by ``weight``, without a loss scale."""
    model = Model(layer=diagonal(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            answer = model(batch["x"])
        return answer.float().mean() * weight

    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=loss_fn,
        batches=({"x": ones()},),
        autocast="float16",
    )
