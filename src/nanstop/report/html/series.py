"""The numbers of a run as points to draw: told once, thinned so that no extreme is lost."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from nanstop.records import Report, Series

MOST = 600
"""Points of one line: more than a page is wide."""
MOST_KEPT = 100
"""Steps whose points all stay."""

Point = tuple[int, float]


def run_series(reports: Sequence[Report], kept: Sequence[Series]) -> dict[str, list[Point]]:
    """Return the points of each series by step: what incidents noted, then ``kept`` of the run.

    Each incident holds the numbers up to its own step. A step is told by the first that has it; an
    incident's own step has what failed and what it was redone with.
    """
    found: dict[str, dict[int, list[float]]] = {}
    own = {report.incident.at.step for report in reports}
    sources = [one for report in reports for one in report.incident.history]
    for one in (*sources, *kept):
        rows: dict[int, list[float]] = {}
        for step, value in zip(one.steps, one.values, strict=False):
            rows.setdefault(step, []).append(value)
        told = found.setdefault(one.name, {})
        for step, values in rows.items():
            if step not in told:
                told[step] = values
            elif step in own and not _same(told[step], values):
                told[step] = told[step] + values
    return {
        name: [(step, value) for step in sorted(rows) for value in rows[step]]
        for name, rows in found.items()
    }


def _same(first: list[float], second: list[float]) -> bool:
    return len(first) == len(second) and all(
        a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(first, second, strict=True)
    )


def thinned(
    points: Sequence[Point], keep: Collection[int] = (), most: int = MOST
) -> tuple[Point, ...]:
    """Return at most about ``most`` points, in order: of each stretch the smallest, the largest and
    the first that is not finite; the first and last of all; and those of the steps in ``keep``.
    """
    if len(points) <= most:
        return tuple(points)
    width = math.ceil(len(points) / max(most // 3, 1))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), width):
        kept.update(_extremes(points, range(start, min(start + width, len(points)))))
    wanted = set(sorted(keep)[:MOST_KEPT])
    kept.update(at for at, (step, _) in enumerate(points) if step in wanted)
    return tuple(points[at] for at in sorted(kept))


def _extremes(points: Sequence[Point], places: Iterable[int]) -> Iterable[int]:
    finite, bad = [], []
    for at in places:
        (finite if math.isfinite(points[at][1]) else bad).append(at)
    if finite:
        yield min(finite, key=lambda at: points[at][1])
        yield max(finite, key=lambda at: points[at][1])
    yield from bad[:1]
