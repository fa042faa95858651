"""One update at a rate of its own, and a loss that has stayed up ever since."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from nanstop.diagnose.evidence.reading import series_values
from nanstop.frozen import frozen
from nanstop.records import Evidence

_BY_FAR = 10.0
"""Times the rates of the updates beside it."""
_BESIDE = 8
"""Updates on each side that have to say what is usual."""
_SINCE = 16
"""Losses since then of which none may be as low as the highest before."""
_HIGHER = 2.0
"""Times the usual loss before."""


@frozen
class LoneUpdate:
    """The update of a ``step`` at a ``rate``, among others at ``usual`` or less. ``highest``: of
    the losses up to it; ``lowest``: of those since.
    """

    step: int
    rate: float
    usual: float
    highest: float
    lowest: float


def lone_update(evidence: Evidence) -> LoneUpdate | None:
    """Return the update after which the loss went up for good, if its rate was a lone spike; None
    without one. Losses have to be positive: one below zero has no floor.
    """
    rates = series_values(evidence, "lr")
    highest = max((rate for _, rate in rates), default=0.0)
    place = next((n for n, (_, rate) in enumerate(rates) if rate == highest), 0)
    before = [rate for _, rate in rates[max(0, place - _BESIDE) : place]]
    after = [rate for _, rate in rates[place + 1 :]]
    usual = max((*before, *after), default=0.0)
    if min(len(before), len(after)) < _BESIDE or not 0.0 < _BY_FAR * usual <= highest:
        return None
    step = rates[place][0]
    losses = series_values(evidence, "loss_raw")
    return _judged(
        step,
        (highest, usual),
        [loss for at, loss in losses if at <= step][-4 * _SINCE :],
        [loss for at, loss in losses if at > step],
    )


def _judged(
    step: int, rates: tuple[float, float], before: Sequence[float], since: Sequence[float]
) -> LoneUpdate | None:
    if len(before) < _BESIDE or len(since) < _SINCE or not min(*before, *since) > 0.0:
        return None
    highest, lowest = max(before), min(since)
    if lowest <= highest or median(since) < _HIGHER * median(before):
        return None
    return LoneUpdate(step, *rates, highest, lowest)
