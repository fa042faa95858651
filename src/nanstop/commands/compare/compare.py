"""``nanstop compare``: two recorded runs side by side.

Where they part, in which number and in which layer.

A run is recorded by ``series.json`` (``nanstop run --series``), by the histories of its incidents,
and by the ``trainer_state.json`` that transformers saves with a checkpoint. Names tell the last
apart: what a trainer logged is ``logged_...``, counted from its step 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanstop.commands.compare.layers import (
    Layer,
    Values,
    gap,
    layer_of_incidents,
    layer_of_ranges,
    sampled_steps,
)
from nanstop.errors import NanstopError
from nanstop.records import Report
from nanstop.records.record import record
from nanstop.records.vocabulary import ROOM
from nanstop.session.sampled_ranges import module_of
from nanstop.store.files import MAX_JSON_BYTES, read_text
from nanstop.store.incidents import (
    REPORT,
    SERIES,
    SUMMARY,
    incident_folders,
    load_report,
    load_series,
    load_summary,
)
from nanstop.store.summary import summary_row

TRAINER_STATE = "trainer_state.json"


@record
class SeriesRow:
    """One series of both runs. ``first_difference``: first step at which it is not equal in both.

    ``first_divergence``: first step at which it differs by more than the tolerance; ``a`` and ``b``
    are the values there, or at the last common step. ``largest``: the largest relative difference
    (infinite where one is not finite).
    """

    name: str
    num_steps: int
    first_difference: int | None
    first_divergence: int | None
    a: float
    b: float
    largest: float


@record
class RunComparison:
    """Two runs.

    ``step`` and ``series``: the first divergence; None where they agree within ``tolerance``.

    ``layer``: the first one that parts, at ``range_steps``, the common steps at which ranges of
    modules were sampled, or in an incident. ``only_a``, ``only_b``: series of one run alone.
    """

    a: str
    b: str
    tolerance: float
    step: int | None
    series: str | None
    layer: Layer | None
    rows: tuple[SeriesRow, ...]
    range_steps: tuple[int, ...] = ()
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    incidents_a: tuple[str, ...] = ()
    incidents_b: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether no series and no layer of the two runs differs by more than ``tolerance``."""
        return self.step is None and self.layer is None


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """What is recorded of one run. ``ranges``: of its modules, in the order of the forward."""

    path: str
    series: Mapping[str, Values] = field(default_factory=dict)
    ranges: Mapping[str, Values] = field(default_factory=dict)
    reports: tuple[Report, ...] = ()


def load_run(path: str | Path) -> ComparedRun:
    """Return what a folder, an incident or a ``trainer_state.json`` holds of a run.

    Of several checkpoints the last one counts. Errors:
    ``NanstopError`` NS001 for nothing of a run, or damaged files.
    """
    given = Path(path)
    if not given.exists():
        raise NanstopError(f"no such run: {given}")
    state = given if given.name == TRAINER_STATE else _last_state(given)
    reports = () if given.name == TRAINER_STATE else tuple(_reports(given))
    own = given / SERIES if given.is_dir() else None
    kept = load_series(own) if own is not None and own.exists() else ()
    if state is None and not reports and not kept:
        raise NanstopError(
            f"nothing is recorded in {given}",
            hint="nanstop run --series records a run; transformers does, with each checkpoint",
        )
    series: dict[str, dict[int, list[float]]] = {}
    ranges: dict[str, dict[int, list[float]]] = {}
    noted = (*kept, *(each for report in reports for each in report.incident.history))
    for one in noted:
        if one.name.startswith(ROOM):  # looked at when the clock allowed it
            continue
        module = module_of(one.name)
        place, name = (series, one.name) if module is None else (ranges, module)
        _add(place, name, zip(one.steps, one.values, strict=True))
    if state is not None:
        for name, values in _logged(state).items():
            _add(series, name, values)
    return ComparedRun(str(given), series, ranges, reports)


def compare(first: ComparedRun, second: ComparedRun, *, tolerance: float = 0.01) -> RunComparison:
    """Return where two runs part.

    Values within ``tolerance`` of each other, relative to the larger, agree.

    Errors: ``NanstopError`` NS001 for a tolerance below zero, or runs without a series in common.
    """
    if not tolerance >= 0.0:
        raise NanstopError(f"a tolerance is at least 0, not {tolerance}")
    names = [name for name in first.series if name in second.series]
    if not names and not (first.reports and second.reports):
        raise NanstopError(
            "the two runs have nothing in common to compare",
            hint=f"A has {_listed(first.series)}; B has {_listed(second.series)}",
        )
    rows = [_row(name, first.series[name], second.series[name], tolerance) for name in names]
    rows = [row for row in rows if row is not None]
    parted = [row for row in rows if row.first_divergence is not None]
    # Within a step the loss comes first.
    earliest = min(
        parted, key=lambda row: (row.first_divergence or 0, "loss" not in row.name), default=None
    )
    layers = (
        layer_of_ranges(first.ranges, second.ranges, tolerance),
        layer_of_incidents(first.reports, second.reports, tolerance),
    )
    return RunComparison(
        a=first.path,
        b=second.path,
        tolerance=tolerance,
        step=earliest.first_divergence if earliest else None,
        series=earliest.name if earliest else None,
        layer=min(filter(None, layers), key=lambda layer: layer.step, default=None),
        rows=tuple(rows),
        range_steps=sampled_steps(first.ranges, second.ranges),
        only_a=tuple(name for name in first.series if name not in second.series),
        only_b=tuple(name for name in second.series if name not in first.series),
        incidents_a=tuple(map(_incident, first.reports)),
        incidents_b=tuple(map(_incident, second.reports)),
    )


def render(found: RunComparison) -> str:
    """Return the comparison as text.

    The first divergence, the layer, each series, what one run alone has.
    """
    lines = [f"A {found.a}", f"B {found.b}"]
    if found.step is not None:
        lines.append(f"they part at step {found.step}, in {found.series}")
    else:
        lines.append(f"no number differs by more than {100.0 * found.tolerance:g} %")
    if found.layer is not None:
        names = [f"`{name}`" for name in (found.layer.op, found.layer.module) if name]
        place = " in ".join(names)
        lines.append(f"  layer: {place}, step {found.layer.step}: {found.layer.why}")
    elif found.range_steps:
        steps = ", ".join(map(str, found.range_steps))
        lines.append(f"  layers: no range of a module differs by more (steps {steps})")
    for row in found.rows:
        first = (
            "equal" if row.first_difference is None else f"differs from step {row.first_difference}"
        )
        apart = "" if row.first_divergence is None else f", apart from step {row.first_divergence}"
        values = "" if row.first_difference is None else f": {row.a:.6g}, {row.b:.6g}"
        lines.append(f"  {row.name} ({row.num_steps} steps): {first}{apart}{values}")
    for name, names in (("A", found.only_a), ("B", found.only_b)):
        lines += [f"  only in {name}: {', '.join(names)}"] if names else []
    for name, rows in (("A", found.incidents_a), ("B", found.incidents_b)):
        lines += [f"  incident of {name}: {row}" for row in rows]
    return "\n".join(lines)


def _reports(folder: Path) -> Iterator[Report]:
    if folder.is_file() or (folder / REPORT).is_file():
        yield load_report(folder)
        return
    try:
        found = incident_folders(folder)
    except NanstopError:
        return
    # An incident folder may hold those of earlier runs; the summary names the last one's.
    summary = folder / SUMMARY
    last = {row.folder for row in load_summary(summary).incidents} if summary.exists() else None
    yield from (load_report(one) for one in found if last is None or one.name in last)


def _last_state(folder: Path) -> Path | None:
    if not folder.is_dir():
        return None
    found = [*folder.glob(TRAINER_STATE), *folder.glob(f"checkpoint-*/{TRAINER_STATE}")]
    return max(found, key=lambda one: len(_history(one)), default=None)


def _history(file: Path) -> list[dict[str, Any]]:
    try:
        state = json.loads(read_text(file, MAX_JSON_BYTES))
    except ValueError as error:
        raise NanstopError(f"{file}: not JSON ({error})") from error
    rows = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise NanstopError(f"{file}: no log_history; transformers writes one")
    return rows


def _logged(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every number that a trainer logged, by name and step.

    Its sums at the end of training are not steps.
    """
    series: dict[str, list[tuple[int, float]]] = {}
    for row in _history(file):
        step = row.get("step")
        if not isinstance(step, int) or "train_runtime" in row:
            continue
        for name, value in row.items():
            if name not in ("step", "epoch") and isinstance(value, int | float) and _lasting(name):
                series.setdefault(f"logged_{name}", []).append((step, float(value)))
    return series


def _lasting(name: str) -> bool:
    """Return whether a logged number says something of the training, not of the machine's speed."""
    return not name.endswith(("_runtime", "_per_second", "step_time"))


def _add(
    series: dict[str, dict[int, list[float]]], name: str, values: Iterable[tuple[int, float]]
) -> None:
    """Add values to a series; of a step that two incidents remember the longer memory counts."""
    new: dict[int, list[float]] = {}
    for step, value in values:
        new.setdefault(step, []).append(value)
    known = series.setdefault(name, {})
    for step, noted in new.items():
        known[step] = max(known.get(step, []), noted, key=len)


def _row(name: str, first: Values, second: Values, tolerance: float) -> SeriesRow | None:
    common = sorted(first.keys() & second.keys())
    pairs = [
        (step, a, b) for step in common for a, b in zip(first[step], second[step], strict=False)
    ]
    if not pairs:
        return None
    gaps = [gap(a, b) for _, a, b in pairs]
    apart = next((i for i, one in enumerate(gaps) if one > tolerance), None)
    differs = next((i for i, one in enumerate(gaps) if one > 0.0), None)
    _, a, b = pairs[-1 if apart is None else apart]
    return SeriesRow(
        name=name,
        num_steps=len(common),
        first_difference=None if differs is None else pairs[differs][0],
        first_divergence=None if apart is None else pairs[apart][0],
        a=a,
        b=b,
        largest=max(gaps),
    )


def _incident(report: Report) -> str:
    row = summary_row(report)
    where = f" at `{row.module}`" if row.module else ""
    return f"{row.code} at step {row.step}, {row.phase}{where}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "no series"
