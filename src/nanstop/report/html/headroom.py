"""How much room each layer had left in the run's format, at the steps that were sampled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanstop.records import FORMAT_MAX, RunFacts
from nanstop.records.formats import HALF
from nanstop.records.vocabulary import ROOM
from nanstop.report.html.series import Point
from nanstop.wording import number

PREFIX = "range "
"""Of the name of a series of ranges: ``range 0007 model.layers.1.mlp`` is the eighth module."""
MOST_ROWS = 48
MOST_COLUMNS = 20
LEVELS = (0.0, 1.0, 3.0, 6.0)
"""Doublings left up to which a cell is of this level; the last level is all above."""


@dataclass(frozen=True, slots=True)
class Cell:
    """``level``: 0 for beyond the format, up to 4 for much room; ``text``: doublings left.
    ``largest``: of the module's output.
    """

    level: int
    text: str
    largest: str


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Rows in the order of the forward, named below ``parent``. ``left_out``: modules with more
    room than those shown.
    """

    dtype: str
    parent: str
    steps: tuple[int, ...]
    rows: tuple[tuple[str, tuple[Cell | None, ...]], ...]
    left_out: int


def format_of(facts: RunFacts) -> str:
    """Return the narrowest format that the run computes in."""
    if facts.autocast in HALF:
        return str(facts.autocast)
    stored = [group.dtype for group in facts.param_groups if group.dtype in FORMAT_MAX]
    return min(stored, key=FORMAT_MAX.__getitem__, default="float32")


def heat_map(series: Mapping[str, Sequence[Point]], facts: RunFacts) -> HeatMap | None:
    """Return the largest outputs of modules as doublings left before the end of the run's format,
    as they were sampled for a comparison or looked at on the way; None where neither was done.
    """
    sampled = {name: dict(points) for name, points in series.items() if name.startswith(PREFIX)}
    dtype = format_of(facts)
    if not sampled:
        dtype, sampled = _looked_at(series)
    steps = sorted({step for points in sampled.values() for step in points})
    if not steps:
        return None
    jump = math.ceil(len(steps) / MOST_COLUMNS)
    steps = sorted({*steps[::jump], steps[-1]})
    names = sorted(sampled)
    least = {name: min(_room(v, dtype) for v in sampled[name].values()) for name in names}
    shown = set(sorted(names, key=least.__getitem__)[:MOST_ROWS])
    modules = {name: name.split(" ", 2)[-1] for name in names if name in shown}
    parent = _parent(tuple(modules.values()))
    rows = tuple(
        (
            modules[name].removeprefix(parent),
            tuple(_cell(sampled[name].get(at), dtype) for at in steps),
        )
        for name in names
        if name in shown
    )
    return HeatMap(dtype, parent, tuple(steps), rows, len(names) - len(rows))


def _looked_at(series: Mapping[str, Sequence[Point]]) -> tuple[str, dict[str, dict[int, float]]]:
    """Return the narrowest format that modules were looked at in, and the largest outputs of those
    that work in it, as if they had been sampled.
    """
    rooms = [name.split(" ", 3) for name in series if name.startswith(ROOM)]
    rooms = [parts for parts in rooms if len(parts) == 4 and parts[2] in FORMAT_MAX]
    dtype = min((parts[2] for parts in rooms), key=lambda one: FORMAT_MAX[one], default="float32")
    sampled: dict[str, dict[int, float]] = {}
    for parts in rooms:
        if parts[2] == dtype:
            points = series[" ".join(parts)]
            sizes = {at: FORMAT_MAX[dtype] * 2.0**-room for at, room in points}
            sampled[f"{PREFIX}{parts[1]} {parts[3]}"] = sizes
    return dtype, sampled


def _parent(modules: Sequence[str]) -> str:
    """Return what all names begin with, up to a dot: "model.layers."; "" where there is nothing."""
    first, last = min(modules).split("."), max(modules).split(".")
    most = min(len(first), len(last)) - 1
    same = next((at for at in range(most) if first[at] != last[at]), most)
    return "".join(f"{word}." for word in first[:same])


def _room(size: float, dtype: str) -> float:
    if size == 0.0:
        return math.inf
    if not math.isfinite(size):
        return -math.inf
    return math.log2(FORMAT_MAX[dtype]) - math.log2(abs(size))


def _cell(size: float | None, dtype: str) -> Cell | None:
    if size is None:
        return None
    room = _room(size, dtype)
    level = sum(room >= end for end in LEVELS)
    if room == -math.inf:
        return Cell(0, "not finite", number(size))
    return Cell(level, "all 0" if room == math.inf else f"{room:.1f}", f"{size:.4g}")
