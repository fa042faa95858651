"""Loss, gradient norm, loss scale and learning rate of a run, with what happened marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nanstop.records import Report
from nanstop.report.html.charts import Chart, ChartLine, drawn
from nanstop.report.html.series import MOST_KEPT, Point, thinned
from nanstop.wording import counted, number

CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", (("loss_raw", "each micro-batch"), ("loss_logged", "as logged"))),
    ("Gradient norm", (("grad_norm", "before clipping"),)),
    ("Loss scale", (("scale", "of the scaler"),)),
    ("Learning rate", (("lr", "of the first group"),)),
    ("Headroom", (("headroom", "doublings left in the narrowest module"),)),
)
SKIPPED = ("skip", "quarantine")


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart, "" where there is none, its key, and its numbers as rows of a table and in words."""

    title: str
    svg: str
    key: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]
    said: str


COLUMNS = ("series", "values", "first", "smallest", "largest", "last", "not finite")


def panels(
    series: Mapping[str, Sequence[Point]],
    reports: Sequence[Report],
    *,
    draw: bool,
    name: str = "series",
    say: Callable[[str], str] = str,
) -> Iterator[Panel]:
    """Yield a panel for each quantity that the run noted; ``draw``: with its chart. ``name``: what
    the names of the charts begin with. ``say``: puts what a screen reader says of them into words.
    """
    marks = marked(reports)
    for number_of, (title, names) in enumerate(CHARTS):
        told = [(kind, label, _placed(kind, series)) for kind, label in names if series.get(kind)]
        if told:
            yield panel(f"{name}-{number_of}", title, told, marks, draw=draw, say=say)


def _placed(kind: str, series: Mapping[str, Sequence[Point]]) -> Sequence[Point]:
    """Return a series at the steps that it is of: a trainer logs how many updates are over."""
    if kind != "loss_logged":
        return series[kind]
    return [(step - 1, value) for step, value in series[kind]]


def marked(reports: Sequence[Report]) -> dict[str, tuple[int, ...]]:
    """Return the steps of incidents and their repeats ("incident"), the first of each before all
    others where they are many, and those of which the update was left out ("skip-mark").
    """
    audit = [entry for report in reports for entry in report.audit]
    skipped = {entry.at.step for entry in audit if entry.action.kind in SKIPPED}
    again = sorted(entry.at.step for entry in audit)
    met = dict.fromkeys((*(report.incident.at.step for report in reports), *again))
    found = {"incident": [one for one in met if one not in skipped], "skip-mark": sorted(skipped)}
    return {kind: tuple(sorted(steps[:MOST_KEPT])) for kind, steps in found.items() if steps}


def panel(
    name: str,
    title: str,
    told: Sequence[tuple[str, str, Sequence[Point]]],
    marks: Mapping[str, tuple[int, ...]],
    *,
    draw: bool,
    say: Callable[[str], str] = str,
) -> Panel:
    """Return a chart of lines, each with its class and label, with steps marked."""
    rows = tuple(_row(label, points) for _, label, points in told)
    keep = {step for steps in marks.values() for step in steps}
    lines: list[tuple[str, ChartLine]] = []
    bad: list[int] = []
    for kind, _, points in told:
        few = thinned(points, keep)
        lines.append((kind, tuple((x, y if math.isfinite(y) else None) for x, y in few)))
        bad += [x for x, y in few if not math.isfinite(y)]
    highest = max((y for _, line in lines for _, y in line if y is not None), default=None)
    if bad and highest is not None:
        lines.append(("nonfinite", tuple((x, highest) for x in dict.fromkeys(bad))))
    said = "; ".join(_described(row) for row in rows)
    chart = Chart(
        name=name,
        title=say(title),
        described=say(said + _described_marks(marks)),
        lines=tuple(lines),
        marks=tuple(marks.items()),
        log2=told[0][0] == "scale",
    )
    key = [(kind, label) for kind, label, _ in told]
    key += [("nonfinite", "not finite")] if bad and highest is not None else []
    key += [(kind, _MARKED[kind]) for kind in marks]
    return Panel(title, drawn(chart) if draw else "", tuple(key), rows, said)


_MARKED = {"incident": "incident", "skip-mark": "update skipped", "parts": "they part"}


def _row(label: str, points: Sequence[Point]) -> tuple[str, ...]:
    finite = [value for _, value in points if math.isfinite(value)]
    ends = (number(min(finite)), number(max(finite))) if finite else ("none", "none")
    first, last = (f"{number(value)} at step {step}" for step, value in (points[0], points[-1]))
    bad = str(len(points) - len(finite))
    return (label, str(len(points)), first, *ends, last, bad)


def _described(row: tuple[str, ...]) -> str:
    label, amount, first, least, most, last, bad = row
    return (
        f"{label}: {counted(int(amount), 'value')}, first {first}, last {last}, "
        f"from {least} to {most}, {bad} not finite"
    )


def _described_marks(marks: Mapping[str, tuple[int, ...]]) -> str:
    said = ""
    for kind, steps in marks.items():
        listed = ", ".join(str(step) for step in steps[:8])
        listed += " and more" if len(steps) > 8 else ""
        said += f"; {_MARKED[kind]} at step {listed}"
    return said
