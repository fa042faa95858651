"""A step with other weights, undone: what tells a loss that is at its least from one that hangs on
nothing which is trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanstop.replay.undo import attributes_kept

if TYPE_CHECKING:
    from nanstop.replay.step import Step

MOST_MOVED = 1 << 24
"""Weights that are moved, the last ones first: those of the head are enough."""
_SHARE, _LEAST = 0.1, 0.02
"""By how much of their tensor's size they are moved, and by how much at least."""


@contextmanager
@torch.no_grad()
def moved(parameters: Sequence[Tensor], share: float = _SHARE) -> Iterator[int]:
    """Have other weights inside, in storages of their own; yield how many.

    ``share``: by how much of their tensor's size they are moved.
    """
    num_moved = 0
    with attributes_kept((parameter, "data") for parameter in parameters):
        for parameter, noise in noises(parameters, share):
            parameter.data = parameter.data + noise
            num_moved += noise.numel()
        yield num_moved


def is_constant(step: Step) -> bool:
    """Return whether the loss of the first micro-batch is the same with other weights, and not 0 as
    that of a hinge that is content. Undone; runs it twice.
    """
    weights = [p for p in step.view.root.parameters() if p.requires_grad]
    losses: list[float] = []
    for share in (0.0, 1.0):
        with step.isolated(), moved(weights, share):
            losses.append(float(step.run(0).detach()))
    return losses[0] == losses[1] != 0.0


def noises(parameters: Sequence[Tensor], share: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield weights, the last ones first, each with normal noise to add to it, whose size is
    ``share`` of the root of the mean square of the weight; ``MOST_MOVED`` elements in all.
    """
    generator, left = torch.Generator().manual_seed(0), MOST_MOVED
    for parameter in reversed(parameters):
        if parameter.is_floating_point() and parameter.numel() <= left:
            left -= parameter.numel()
            data = parameter.data
            size = share * data.float().square().mean().sqrt().clamp(min=_LEAST / _SHARE)
            noise = torch.randn(data.shape, generator=generator).to(data.device)
            yield parameter, (size * noise).to(data.dtype)
