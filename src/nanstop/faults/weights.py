"""Weights and optimizer states that are broken, or get broken by an update."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nanstop.faults.parts import WIDTH, Model, diagonal, ones, trained
from nanstop.faults.specimen import (
    Batch,
    Entry,
    Specimen,
    loss_fails,
    pair,
    update_breaks,
    weight_is_bad,
)


def loaded_weights(element: float) -> Specimen:
    """One element of the second layer came as ``element``."""
    loaded = diagonal(1.0)
    model = nn.Sequential(diagonal(1.0), loaded)
    with torch.no_grad():
        loaded.weight[0, 0] = element
    return trained(model)


def reward_head(dtype: torch.dtype, num_steps: int = 2) -> Specimen:
    """A score head stored in ``dtype`` under AdamW with its own eps, gradients of about 1e-4."""
    base, head = diagonal(0.01), nn.Linear(WIDTH, 1, bias=False).to(dtype)
    model = nn.Sequential()
    model.add_module("base", base)
    model.add_module("score", head)
    base.requires_grad_(False)
    nn.init.constant_(head.weight, 0.02)

    def loss_fn(batch: Batch) -> Tensor:
        score = head(base(batch["x"]).to(dtype)).float()
        return (score - 0.01).pow(2).mean() + 0.5

    return trained(
        model,
        loss_fn,
        batches=({"x": ones()},) * num_steps,
        optimizer=torch.optim.AdamW(head.parameters(), lr=1e-3),
    )


def restored_moment(second: float) -> Specimen:
    """AdamW's state was restored with one second moment of ``second``."""
    model = Model(layer=diagonal(1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moments = torch.full((WIDTH, WIDTH), 1e-4)
    moments[0, 0] = second
    state = {"step": torch.tensor(100.0), "exp_avg": moments * 0.0, "exp_avg_sq": moments}
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {0: state}})
    return trained(model, batches=({"x": ones()},) * 2, optimizer=optimizer)


def descent(lr: float) -> Specimen:
    """Gradient descent of two layers at the rate ``lr``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
    return trained(
        model,
        lambda batch: (model(batch["x"]) - batch["x"].sum(-1, keepdim=True)).pow(2).mean(),
        batches=tuple({"x": torch.randn(4, 6, WIDTH)} for _ in range(6)),
        lr=lr,
    )


FAULTS: Mapping[str, Entry] = {
    "NS401": pair(loaded_weights, math.nan, 0.5, weight_is_bad),
    "NS402": pair(reward_head, torch.float16, torch.float32, update_breaks),
    "NS403": pair(restored_moment, -1.0, 1e-4, update_breaks),
    "NS404": pair(descent, 50.0, 1e-2, loss_fails),
}
