"""How far loss and gradient norm have risen from step to step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median, median_low

from nanstop.diagnose.evidence.reading import series_values, standing
from nanstop.frozen import frozen
from nanstop.records import FORMAT_MAX, Evidence

WINDOW = 64
"""Steps that are looked back at."""


@frozen
class Climb:
    """``factor``: the last value over what was usual;
    ``rises``: how often a value was twice all before it; ``highest``: of them all.

    ``is_short``: nothing says whether the history was flat before.
    """

    first: float
    last: float
    highest: float
    rises: int
    is_short: bool

    @property
    def factor(self) -> float:
        """How many times what was usual; a loss near zero is taken as 1."""
        return self.last / max(self.first, 1.0)


def climbs(evidence: Evidence) -> tuple[Climb | None, Climb | None]:
    """Return how loss and norm rose up to the failing step, where losses were finite; from one
    evaluation to the next where updates evaluate a closure, which move the weights in between.
    """
    if "closure" in standing(evidence).sinks:
        return _climbs_of_evaluations(evidence)
    losses, norms = by_step(evidence, "loss_raw"), by_step(evidence, "grad_norm")
    return climb(losses), climb({step: norms[step] for step in losses if step in norms})


def _climbs_of_evaluations(evidence: Evidence) -> tuple[Climb | None, Climb | None]:
    at = evidence.incident.at.step if evidence.incident is not None else math.inf
    losses, norms = (
        [size for step, size in _sizes(evidence, name) if step <= at]
        for name in ("loss_raw", "grad_norm")
    )
    if len(norms) != len(losses):
        return None, None
    finite = [place for place, loss in enumerate(losses) if math.isfinite(loss)]
    return climb({n: losses[n] for n in finite}), climb({n: norms[n] for n in finite})


def climb(history: Mapping[int, float]) -> Climb | None:
    """Return how a history rose up to the failing step; None for one step, or only zeros."""
    values = list(history.values())[-WINDOW:]
    if len(values) < 2 or not any(values):
        return None
    first = median_low(values[: (len(values) + 1) // 2])
    record, rises = first, 0
    for value in values:
        if value > 0.0 and value >= 2.0 * record:
            record, rises = value, rises + 1
    return Climb(first, values[-1], max(values), rises, len(values) < 3)


def by_step(evidence: Evidence, name: str) -> dict[int, float]:
    """Return the size of each step's value: of its micro-batches the median;
    steps that failed are left out.
    """
    at = evidence.incident.at.step if evidence.incident is not None else math.inf
    steps: dict[int, list[float]] = {}
    for step, size in _sizes(evidence, name):
        if step <= at:
            steps.setdefault(step, []).append(size)
    return {step: median(seen) for step, seen in steps.items() if all(map(math.isfinite, seen))}


def _sizes(evidence: Evidence, name: str) -> list[tuple[int, float]]:
    """Return the sizes of a history's values, each with its step.

    The norm of finite gradients overflows before they do: it counts as the largest number.
    """
    largest = FORMAT_MAX["float32"] if name == "grad_norm" else math.inf
    return [(step, min(abs(value), largest)) for step, value in series_values(evidence, name)]
