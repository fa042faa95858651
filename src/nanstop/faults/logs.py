"""Logs that say something else than the training does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from nanstop.diagnose.evidence.log_filter import filtered
from nanstop.faults.parts import Model, diagonal, ones, trained
from nanstop.faults.specimen import Batch, Entry, Specimen, pair, run_plain
from nanstop.faults.weights import reward_head


def log_lies(specimen: Specimen) -> bool:
    """Return whether losses are not finite and transformers' log filter shows a finite number."""
    losses = run_plain(specimen).losses
    return any(map(math.isnan, losses)) and math.isfinite(filtered([[loss] for loss in losses]))


def policy_gradient(stale: float) -> Specimen:
    """The objective of GRPO, its old log-probabilities off by ``stale``: on-policy for 0."""
    model = Model(head=diagonal(0.5))
    x = ones(rows=3)
    x[:, :, 0] = torch.arange(3.0)[:, None]

    def loss_fn(batch: Batch) -> Tensor:
        chosen = model(batch["x"]).log_softmax(-1)[..., 0]
        ratio = torch.exp(chosen - (chosen.detach() - stale * batch["advantage"][:, None]))
        return -(ratio * batch["advantage"][:, None]).mean()

    return trained(model, loss_fn, batches=({"x": x, "advantage": torch.tensor([1.0, 0.0, -1.0])},))


def zero_but_alive(specimen: Specimen) -> bool:
    """Return whether the loss is exactly 0 and its gradient is not."""
    run = run_plain(specimen)
    return run.healthy and run.losses[-1] == 0.0 and run.num_nonzero_gradients > 0


FAULTS: Mapping[str, Entry] = {
    "NS801": Entry(
        partial(reward_head, torch.float16, num_steps=6),
        partial(reward_head, torch.float32, num_steps=6),
        log_lies,
    ),
    "NS802": pair(policy_gradient, 0.0, 0.1, zero_but_alive, quiet=True),
}
