"""Whether a run that remedies were in force in is finite at its end."""

from __future__ import annotations

import math

from nanstop.numerics.tensors import is_inexact, nonfinite
from nanstop.replay.step import ModelView, trainable_of
from nanstop.session.history import History

_LAST = 3
"""Losses at the end of a run that are looked at."""


def not_finite(view: ModelView, series: History) -> tuple[str, ...] | None:
    """Return what is not finite at the end of a run: weights and optimizer state by name, "loss"
    for the last losses; None where that cannot be looked at. Reads each value once; synchronises
    the device.
    """
    try:
        return _not_finite(view, series)
    except Exception:  # what was trained may be gone by now
        return None


def _not_finite(view: ModelView, series: History) -> tuple[str, ...]:
    trained = trainable_of(view)
    weights = {name: p.detach() for name, p in trained.parameters.items()}
    state = {n: v for n, v in trained.state_tensors().items() if is_inexact(v)}
    losses = next((one.values for one in series.recent() if one.name == "loss_raw"), ())
    bad = not all(map(math.isfinite, losses[-_LAST:]))
    return (*nonfinite(weights), *nonfinite(state), *(("loss",) if bad else ()))
