"""A learning-rate range test.

Rates that rise by a constant factor each step, and what the losses after them say.

Source: L. Smith, "Cyclical learning rates for training neural networks", WACV 2017, section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from nanstop.errors import NanstopError
from nanstop.records.record import record

MIN_STEPS = 20

_SIGNIFICANT = 4.5
"""A fall of the smoothed loss counts from so many standard errors on:
the least of many places is looked at.
"""
_BEGUN = 0.1
"""Share of the whole fall from which on the loss is said to be falling."""


@record
class LrRange:
    """What a sweep showed. ``losses``: one for each rate, taken after the update at that rate.

    ``begins``: rate at which the loss has begun to fall; ``steepest``: at which it falls fastest;
    ``lowest``: at which it is least; ``diverges``: at which it has risen above its start by as much
    as it had fallen, or is not finite; each of the smoothed loss, None where it did not happen.
    ``low`` to ``high`` is the range to train in, only with status "found". ``noise``: standard
    deviation of a loss around the smoothed one.
    """

    status: Literal["found", "flat", "too_short"]
    message: str = ""
    low: float | None = None
    high: float | None = None
    begins: float | None = None
    steepest: float | None = None
    lowest: float | None = None
    diverges: float | None = None
    first_loss: float
    lowest_loss: float | None = None
    noise: float = 0.0
    rates: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    smoothed: tuple[float, ...] = ()


def rates(low: float, high: float, num_steps: int) -> tuple[float, ...]:
    """Return ``num_steps`` rates from ``low`` to ``high``, each the same factor above the one
    before.

    Errors: ``NanstopError`` NS001 unless 0 < ``low`` < ``high`` and there are at least
    ``MIN_STEPS``.
    """
    if not 0.0 < low < high < math.inf:
        raise NanstopError(f"a sweep goes from a small rate to a larger one, not {low} to {high}")
    if num_steps < MIN_STEPS:
        raise NanstopError(f"a sweep needs at least {MIN_STEPS} steps, not {num_steps}")
    factor = math.log(high / low) / (num_steps - 1)
    return tuple(low * math.exp(factor * step) for step in range(num_steps))


def has_diverged(first_loss: float, losses: Sequence[float]) -> bool:
    """Return whether a sweep may end here.

    The last loss is not finite, or far above anything that noise explains.
    """
    if losses and not math.isfinite(losses[-1]):
        return True
    if len(losses) < MIN_STEPS // 2:
        return False
    curve = _Curve(first_loss, losses)
    return median(losses[-3:]) > curve.start + 4.0 * curve.rise


def analyse(rates: Sequence[float], first_loss: float, losses: Sequence[float]) -> LrRange:
    """Return what a sweep showed. ``losses`` may be shorter than ``rates``: the sweep ended early.

    A range is suggested only where the loss fell by more than its noise explains: from the rate at
    which it begins to fall, up to a tenth of the rate at which it was least, but not below the one
    at which it falls fastest.
    """
    rates = tuple(rates[: len(losses)])
    finite = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    common: dict[str, Any] = {"first_loss": first_loss, "rates": rates, "losses": tuple(losses)}
    if finite < MIN_STEPS // 2 or not math.isfinite(first_loss):
        ended = f"the loss was not finite after {finite} steps" if finite < len(losses) else ""
        message = f"too few losses to read anything from: {ended or f'{finite} steps'}"
        diverges = rates[finite] if finite < len(rates) else None
        return LrRange(status="too_short", message=message, diverges=diverges, **common)
    curve = _Curve(first_loss, losses[:finite])
    common |= {"smoothed": tuple(curve.smoothed), "noise": curve.noise}
    index = curve.diverged_at()
    if index is None and finite < len(rates):
        index = finite
    common |= {"diverges": None if index is None else rates[index]}
    if not curve.falls():
        message = (
            f"the loss did not fall by more than its noise ({curve.noise:.3g}): "
            "more steps, a larger batch or higher rates may show more"
        )
        return LrRange(status="flat", message=message, **common)
    return _found(rates, curve, common)


def _found(rates: tuple[float, ...], curve: _Curve, common: dict[str, Any]) -> LrRange:
    begins, steepest, lowest = (
        rates[place] for place in (curve.begins_at(), curve.steepest_at(), curve.lowest_at)
    )
    high = max(steepest, lowest / 10.0)
    return LrRange(
        status="found",
        low=min(begins, high),
        high=high,
        begins=begins,
        steepest=steepest,
        lowest=lowest,
        lowest_loss=curve.smoothed[curve.lowest_at],
        **common,
    )


class _Curve:
    """Finite losses of a sweep, smoothed over neighbouring rates by a Gaussian window."""

    def __init__(self, first_loss: float, losses: Sequence[float]) -> None:
        width = max(len(losses) / 30.0, 1.0)
        self.smoothed = [_weighted(losses, place, width) for place in range(len(losses))]
        head = losses[: max(len(losses) // 10, 3)]
        self.start = median([first_loss, *head])
        bends = [
            abs(before - 2.0 * here + after)
            for before, here, after in zip(losses, losses[1:], losses[2:], strict=False)
        ]
        # Second differences hold no trend, only noise (of six times its variance);
        # the median is deaf to divergence.
        self.noise = median(bends) / (0.6745 * math.sqrt(6.0))
        self.lowest_at = min(range(len(losses)), key=self.smoothed.__getitem__)
        self.fall = max(self.start - self.smoothed[self.lowest_at], 0.0)
        # Of the median at the start (1.57 times the variance of a mean) and of the weighted mean at
        # the lowest place.
        weights = _weights(len(losses), self.lowest_at, width).values()
        share = 1.57 / (len(head) + 1) + sum(weight**2 for weight in weights)
        self.error = self.noise * math.sqrt(share)

    @property
    def rise(self) -> float:
        """How far above its start the loss must be to have diverged."""
        return max(self.fall, 5.0 * self.noise, 1e-6 * abs(self.start))

    def falls(self) -> bool:
        return self.fall > max(_SIGNIFICANT * self.error, 1e-6 * abs(self.start))

    def diverged_at(self) -> int | None:
        limit = self.start + self.rise
        return next((i for i, loss in enumerate(self.smoothed) if loss > limit), None)

    def begins_at(self) -> int:
        """Return the place from which on, up to the lowest, the loss stays below its start by a
        tenth of the fall.
        """
        limit = self.start - _BEGUN * self.fall
        above = [i for i in range(self.lowest_at) if self.smoothed[i] > limit]
        return above[-1] + 1 if above else 0

    def steepest_at(self) -> int:
        slopes = [after - before for before, after in pairwise(self.smoothed[: self.lowest_at + 1])]
        return min(range(len(slopes)), key=slopes.__getitem__) + 1 if slopes else 0


def _weighted(values: Sequence[float], place: int, width: float) -> float:
    return sum(weight * values[i] for i, weight in _weights(len(values), place, width).items())


def _weights(count: int, place: int, width: float) -> dict[int, float]:
    """Return the share of each place near ``place`` in the mean there; they add up to 1."""
    reach = math.ceil(3.0 * width)
    near = range(max(place - reach, 0), min(place + reach + 1, count))
    weights = {i: math.exp(-0.5 * ((i - place) / width) ** 2) for i in near}
    total = sum(weights.values())
    return {i: weight / total for i, weight in weights.items()}
