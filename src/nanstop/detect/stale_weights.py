"""Whether a forward computes with copies of the weights that were cast before an update.

Autocast keeps what it casts until it is left. Entered once around a whole loop, it is never left,
and every matrix product computes with the first weights. A micro-batch is run again as it was, and
with every weight cast anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nanstop.replay.step import ModelView, Step


def keeps_casts(view: ModelView) -> bool:
    """Return whether autocast is on, and keeps what it casts, where an update is about to be
    made.
    """
    kept = torch.is_autocast_cache_enabled()
    return kept and torch.is_autocast_enabled(view.device_type)


def stale_losses(step: Step) -> tuple[float, float] | None:
    """Return the loss of the first micro-batch as it is and with its weights cast anew;
    None where both are the same.

    Undone bitwise: what autocast keeps is neither used nor dropped by the second. Synchronises.
    """
    first, again = _loss(step), _loss(step)
    with _cast_anew():
        anew = _loss(step)
    # What a kernel does differently from one run to the next is no difference of weights.
    return (first, anew) if abs(anew - first) > 4 * abs(again - first) else None


def _loss(step: Step) -> float:
    with step.isolated():
        return float(step.run(0).detach())


@contextmanager
def _cast_anew() -> Iterator[None]:
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(kept)
