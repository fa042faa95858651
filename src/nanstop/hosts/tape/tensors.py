"""Small questions to tensors that a loop hands around."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def total(losses: Iterable[Tensor]) -> Tensor:
    """Return the detached sum of what ``backward`` was called on in one micro-batch."""
    scalars = [loss.detach().sum() if loss.dim() else loss.detach() for loss in losses]
    return sum(scalars[1:], start=scalars[0]) if scalars else torch.zeros(())


def autocast_state(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
