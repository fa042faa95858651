"""One update at a rate of its own, and what came of it: a loss that has stayed up ever since, or a
failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from nanstop.diagnose.evidence.reading import series_values
from nanstop.frozen import frozen
from nanstop.records import Evidence

_BY_FAR = 10.0
"""Times the rates of the updates beside it."""
_ABOVE_ALL = 1e3
"""Times the rates of the updates before it: no schedule makes such a step but by a slip."""
_GROWS, _SAME_FACTOR = 1.05, 1.001
_BESIDE = 8
"""Updates on each side that have to say what is usual."""
_SINCE = 16
"""Losses since then of which none may be as low as the highest before."""
_FEW = 4
"""Losses that say what they were before one that is far above them."""
_JUMP, _STAYS_UP = 1e3, 100.0
"""Times the highest before: that of the loss that jumps, and of the lowest since."""
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


@frozen
class RaisedRate:
    """The first of the last updates before a failure that were made, or one of them, at a ``rate``:
    that of a ``step``. All before were at ``usual`` or less.
    """

    step: int
    rate: float
    usual: float


@frozen
class JumpedLoss:
    """The loss of a ``step``, far above the ``highest`` before it; ``lowest``: of those since."""

    step: int
    loss: float
    highest: float
    lowest: float


def jumped_loss(evidence: Evidence) -> JumpedLoss | None:
    """Return the step whose loss was the first to be far above all before it, if none since has
    come anywhere near them; None without one. Losses have to be positive; small ones count as 1: a
    critic that has seen no reward yet, a student that is still its teacher.
    """
    losses = series_values(evidence, "loss_raw")[-4 * _SINCE :]
    values = [loss for _, loss in losses]
    if len(values) <= _SINCE or not _JUMP < max(values[-_SINCE:]) < math.inf:  # nearly all runs
        return None
    usual = [max(1.0, *values[:n]) for n in range(_FEW, len(values) - _SINCE)]
    jumps = (n for n, most in enumerate(usual, _FEW) if values[n] > _JUMP * most)
    place = next(jumps, None)
    if place is None or not min(values) > 0.0:
        return None
    highest, lowest = max(values[:place]), min(values[place:])
    is_up = lowest > _STAYS_UP * max(1.0, highest)
    return JumpedLoss(losses[place][0], values[place], highest, lowest) if is_up else None


def raised_rate(evidence: Evidence) -> RaisedRate | None:
    """Return the update shortly before a failure whose rate is next to none of those before it;
    None without one.
    """
    if evidence.incident is None:
        return None
    at = evidence.incident.at.step
    rates = [(step, rate) for step, rate in series_values(evidence, "lr") if step < at]
    highest = max((rate for _, rate in rates), default=0.0)
    place = next((n for n, (_, rate) in enumerate(rates) if rate == highest), 0)
    usual = max((rate for _, rate in rates[:place]), default=0.0)
    if len(rates) - place > _BESIDE or not 0.0 < usual * _ABOVE_ALL <= highest:
        return None
    return RaisedRate(rates[place][0], highest, usual)


def rates_so_far(evidence: Evidence) -> list[float]:
    """Return the learning rates up to the failure, those of 0 left out."""
    at = evidence.incident.at.step if evidence.incident is not None else math.inf
    return [rate for step, rate in series_values(evidence, "lr") if step <= at and rate > 0.0]


def growth_of_rate(evidence: Evidence) -> float | None:
    """Return the factor by which each of the last updates before a failure was made at a higher
    rate than the one before it; None where it is not always the same. A warm-up adds.
    """
    rates = rates_so_far(evidence)[-_BESIDE - 1 :]
    factors = [new / old for old, new in pairwise(rates)]
    if len(factors) < _BESIDE or not _GROWS < min(factors) <= max(factors) < math.inf:
        return None
    return factors[-1] if max(factors) < min(factors) * _SAME_FACTOR else None


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
