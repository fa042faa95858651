"""Two runs beside each other in Python: to print, or to look at in a notebook."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanstop.commands.compare.compare import ComparedRun, RunComparison, load_run, render
from nanstop.commands.compare.compare import compare as compared

if TYPE_CHECKING:
    from nanstop.report.html.timeline import Panel


@dataclass(frozen=True, slots=True)
class SideBySide:
    """``str`` gives the terminal's text; a notebook shows each number of both runs in one chart.
    ``record``: what ``nanstop compare --json`` prints.
    """

    record: RunComparison
    a: ComparedRun
    b: ComparedRun

    def __str__(self) -> str:
        return render(self.record)

    def _repr_html_(self) -> str:
        from nanstop.report.html.notebook import sheet_html
        from nanstop.report.html.sheet import Sheet, lines_of

        said, panels = lines_of(str(self)), tuple(self._panels())
        return sheet_html(Sheet(title="nanstop compare", said=(said,), panels=panels))

    def _panels(self) -> Iterator[Panel]:
        from nanstop.report.html.charts import are_available
        from nanstop.report.html.timeline import panel

        draw = are_available()
        for at, row in enumerate(self.record.rows):
            told = [
                (kind, label, _points(run, row.name))
                for kind, label, run in (("run-a", "A", self.a), ("run-b", "B", self.b))
            ]
            step = row.first_divergence
            marks = {} if step is None else {"parts": (step,)}
            yield panel(f"compared-{at}", row.name, told, marks, draw=draw)


def _points(run: ComparedRun, name: str) -> list[tuple[int, float]]:
    rows = run.series[name]
    return [(step, value) for step in sorted(rows) for value in rows[step]]


def compare(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, tolerance: float = 0.01
) -> SideBySide:
    """Return where two recorded runs part: their folders, incidents or ``trainer_state.json``.

    Values within ``tolerance`` of each other, relative to the larger, agree. Nothing is run.
    Errors: ``NanstopError`` NS001 for nothing of a run, or runs without a series in common.
    """
    first, second = load_run(Path(a)), load_run(Path(b))
    return SideBySide(compared(first, second, tolerance=tolerance), first, second)
