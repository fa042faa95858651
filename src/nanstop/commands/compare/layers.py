"""In which layer two recorded runs part.

By the ranges of their modules, or by the operations of their incidents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from nanstop.records import OpEvent, Report
from nanstop.records.record import record
from nanstop.store.summary import summary_row

Values = Mapping[int, Sequence[float]]
"""By step, what was noted of it: one value, or one for each micro-batch."""


@record
class Layer:
    """Where one run's layers part from the other's. ``why``: in words; ranges are of outputs.

    ``op``: of an operation that an incident recorded;
    empty for a module, whose range was sampled at this step.
    """

    step: int
    module: str
    op: str
    why: str


def layer_of_ranges(
    first: Mapping[str, Values], second: Mapping[str, Values], tolerance: float
) -> Layer | None:
    """Return the module that parts first, in the order of the forward, at the first sampled step
    where any does.
    """
    for step in sampled_steps(first, second):
        for module, values in first.items():
            theirs = second.get(module, {}).get(step)
            if step not in values or theirs is None:
                continue
            a, b = values[step][0], theirs[0]
            if gap(a, b) > tolerance:
                return Layer(step=step, module=module, op="", why=_apart(a, b))
    return None


def sampled_steps(first: Mapping[str, Values], second: Mapping[str, Values]) -> tuple[int, ...]:
    """Return the steps at which ranges of a module were sampled in both runs."""
    common = (first[name].keys() & second[name].keys() for name in first if name in second)
    return tuple(sorted(set[int]().union(*common)))


def _apart(a: float, b: float) -> str:
    return f"max {a:.6g} in A, {b:.6g} in B"


def layer_of_incidents(
    first: Sequence[Report], second: Sequence[Report], tolerance: float
) -> Layer | None:
    """Return the first operation whose range differs between the runs' incidents, or that failed
    in one run only.
    """
    for a, b in _by_step(first, second):
        if a is not None and b is not None:
            found = _differing_op(a, b, tolerance)
            if found is not None:
                return found
            continue
        report, name = (a, "A") if a is not None else (b, "B")
        assert report is not None
        row = summary_row(report)
        why = f"{row.code} in {name} only"
        return Layer(step=row.step, module=row.module or "", op=row.op or row.phase, why=why)
    return None


def _by_step(
    first: Sequence[Report], second: Sequence[Report]
) -> Iterator[tuple[Report | None, Report | None]]:
    """Yield the incidents of both runs, those of one step together, the earliest first."""
    ours = {report.incident.at.step: report for report in reversed(first)}
    theirs = {report.incident.at.step: report for report in reversed(second)}
    for step in sorted({*ours, *theirs}):
        yield ours.get(step), theirs.get(step)


def _differing_op(a: Report, b: Report, tolerance: float) -> Layer | None:
    ours, theirs = _events(a), _events(b)
    for key, event in ours.items():
        other = theirs.get(key)
        for mine, yours in zip(event.outputs, other.outputs if other else (), strict=False):
            if mine.finite != yours.finite or gap(mine.absmax, yours.absmax) > tolerance:
                why = _apart(mine.absmax, yours.absmax)
                step = a.incident.at.step
                return Layer(step=step, module=event.module, op=event.op, why=why)
    return None


def _events(report: Report) -> dict[tuple[str, str, str, int], OpEvent]:
    """Return the operations whose ranges a report holds, in order, by phase, name, module and
    occurrence.
    """
    place = report.localization
    events = [*place.growth, *([place.first_bad] if place.first_bad else [])] if place else []
    found: dict[tuple[str, str, str, int], OpEvent] = {}
    for event in sorted(events, key=lambda one: one.index):
        name = (event.phase, event.op, event.module)
        found[(*name, sum(key[:3] == name for key in found))] = event
    return found


def gap(a: float, b: float) -> float:
    """Return the difference relative to the larger magnitude.

    Infinite where only one is that infinity or NaN.
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
