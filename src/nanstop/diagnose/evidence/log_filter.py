"""The arithmetic of transformers' ``logging_nan_inf_filter``, and its inverse.

``Trainer`` keeps the sum of the losses since it last logged. With the filter on (the default) a
micro-batch whose loss is not finite adds ``sum / (1 + steps since the last log)`` instead, which
multiplies the sum by 1 + 1/n; the log shows the sum over the number of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from nanstop.frozen import frozen

TOLERANCE = 2e-4
"""Relative: the Trainer adds in float32, thousands of terms at most."""

PLAUSIBLE_LOSS = (1e-2, 50.0)
HUGE = 1e6


@frozen
class Decoded:
    """What a logged number really was. Steps count from 0 in the window that the number covers.

    ``before``: mean of the losses a step before the first bad micro-batch, in the units of the log;
    None if there is none. ``multiplier``: what the filter multiplied the sum by, in all.
    """

    logged: float
    num_bad: int
    num_losses: int
    first_step: int
    first_micro: int
    before: float | None
    multiplier: float


def filtered(window: Sequence[Sequence[float]]) -> float:
    """Return what the filter logs for raw losses: of each step, its micro-batches."""
    total = 0.0
    for step, losses in enumerate(window):
        for loss in losses:
            total += loss if math.isfinite(loss) else total / (1 + step)
    return total / len(window)


def decode_logged(logged: float, window: Sequence[Sequence[float]]) -> Decoded | None:
    """Return what ``logged`` hides;
    None if every loss is finite or the filter's arithmetic does not give it.

    ``window``: raw losses of the micro-batches of each step since the last log. They may be
    undivided or divided by the accumulation (a loss that does not count tokens is divided before it
    is logged): the scale that fits is taken.
    """
    bad = [
        (step, micro)
        for step, losses in enumerate(window)
        for micro, loss in enumerate(losses)
        if not math.isfinite(loss)
    ]
    if not bad or not math.isfinite(logged):
        return None
    predicted = filtered(window)
    num_micro = max(len(losses) for losses in window)
    scale = next((s for s in (1.0, 1.0 / num_micro) if _agree(logged, predicted * s)), None)
    if scale is None:
        return None
    first_step, first_micro = bad[0]
    healthy = [loss for losses in window[:first_step] for loss in losses]
    healthy += window[first_step][:first_micro]
    num_steps = first_step + first_micro / len(window[first_step])
    return Decoded(
        logged=logged,
        num_bad=len(bad),
        num_losses=sum(len(losses) for losses in window),
        first_step=first_step,
        first_micro=first_micro,
        before=scale * sum(healthy) / num_steps if healthy else None,
        multiplier=math.prod(1.0 + 1.0 / (1 + step) for step, _ in bad),
    )


def _agree(logged: float, predicted: float) -> bool:
    return math.isclose(logged, predicted, rel_tol=TOLERANCE, abs_tol=1e-30)


def explain_number(logged: float, *, num_steps: int, num_micro: int) -> tuple[Decoded, ...]:
    """Return the plausible readings of a logged number whose raw losses were not kept.

    Each assumes that all micro-batches failed from the start of one step of the window on; a
    reading is plausible if the mean loss before lies between 0.01 and 50. Exactly 0.0 has one
    reading: no loss of the window was finite.
    """
    readings = []
    for first in range(num_steps):
        # the product of (n + 1) / n over n = first + 1 .. num_steps, once for each micro-batch
        multiplier = ((num_steps + 1) / (first + 1)) ** num_micro
        before = logged * num_steps / (first * multiplier) if first else None
        if (before is None) != (logged == 0.0):
            continue
        if before is not None and not PLAUSIBLE_LOSS[0] <= before <= PLAUSIBLE_LOSS[1]:
            continue
        num_losses = num_steps * num_micro
        num_bad = (num_steps - first) * num_micro
        readings.append(Decoded(logged, num_bad, num_losses, first, 0, before, multiplier))
    return tuple(readings)
