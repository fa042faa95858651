"""A run that is followed: what its folder says now, read again only where it has changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nanstop.errors import NanstopError
from nanstop.records import Report, Series
from nanstop.report.html.series import Point, run_series
from nanstop.report.text.progress import Stage
from nanstop.store.incidents import REPORT, SERIES, SUMMARY, load_report, load_series, load_summary
from nanstop.store.live_file import LIVE, LiveLines, Wish
from nanstop.store.summary import Summary

T = TypeVar("T")

_RATE_LINES = 12
"""Lines of the live file over which the pace is taken."""
_RENEWED_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """A run as it stands. ``quiet_seconds``: since its last line was seen to come, or was written.
    ``steps``: that are over. ``pace``: seconds of a step. ``problem``: why it cannot be
    followed, or "".
    """

    name: str
    host: str = ""
    steps: int = 0
    pace: float | None = None
    quiet_seconds: float = 0.0
    is_over: bool = False
    stage: Stage | None = None
    summary: Summary | None = None
    reports: tuple[Report, ...] = ()
    series: dict[str, list[Point]] = field(default_factory=dict[str, list[Point]])
    problem: str = ""


@dataclass(slots=True)
class _Told:
    """What the live file of one training has told so far."""

    host: str = ""
    rows: dict[str, list[Point]] = field(default_factory=dict[str, list[Point]])
    steps: int = 0
    end: int | None = None
    stage: dict[str, Any] = field(default_factory=dict[str, Any])
    stage_at: float = 0.0
    at: float = 0.0
    pace: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])

    def add(self, line: dict[str, Any]) -> None:
        self.at = _number(line.get("at")) or self.at
        if isinstance(line.get("host"), str):
            self.host = line["host"]
        if isinstance(line.get("step"), int):
            self.steps = line["step"] + 1
            self.pace = [*self.pace[-_RATE_LINES:], (self.steps, self.at)]
        if isinstance(line.get("end"), int):
            self.end = line["end"]
        if "stage" in line:
            if "tried" not in line:
                self.stage, self.stage_at = dict(line), self.at
            else:
                self.stage |= line
        series = line.get("series")
        for name, points in series.items() if isinstance(series, dict) else ():
            with suppress(TypeError, ValueError):
                new = [(int(step), float(value)) for step, value in points]
                self.rows.setdefault(str(name), []).extend(new)
        if series:
            self.steps = max([self.steps, *(rows[-1][0] for rows in self.rows.values() if rows)])

    def seconds_a_step(self) -> float | None:
        if len(self.pace) < 2:
            return None
        (first, began), (last, now) = self.pace[0], self.pace[-1]
        return (now - began) / (last - first) if last > first and now > began else None


class FollowedRun:
    """Follows the run in a folder. ``clock``, and ``wall``, by which its lines are dated, in
    seconds.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder
        self.name = name
        self._clock, self._wall = clock, wall
        self._began = clock()
        self._wish = Wish(folder)
        self._renewed = -math.inf
        self._problem = ""
        self._lines = LiveLines(folder)
        self._told = _Told()
        self._known: dict[Path, tuple[Any, Any]] = {}
        self._changed: float | None = None
        self._looks = 0

    def look(self) -> RunNow:
        """Return what the folder says now. Never raises."""
        now = self._clock()
        self._want(now)
        lines, begun = self._lines.new()
        if begun:
            self._told = _Told()
        for line in lines:
            self._told.add(line)
        summary = self._read(self.folder / SUMMARY, load_summary)
        rows = summary.incidents if summary is not None else ()
        reports = [self._read(self.folder / row.folder / REPORT, load_report) for row in rows]
        found = tuple(report for report in reports if report is not None)
        if lines and self._looks:
            self._changed = now
        self._looks += 1
        told = self._told
        ended = told.end is not None or (summary is not None and summary.exit is not None)
        return RunNow(
            name=self.name,
            host=told.host,
            steps=max(told.steps, summary.steps if summary is not None else 0),
            pace=told.seconds_a_step(),
            quiet_seconds=self._quiet(now),
            is_over=ended,
            stage=None if ended else self._stage(now),
            summary=summary,
            reports=found,
            series=self._series(found),
            problem="" if ended else self._problem,
        )

    def close(self) -> None:
        """Follow the run no more."""
        self._wish.drop()

    def _want(self, now: float) -> None:
        if now - self._renewed < _RENEWED_SECONDS or not self.folder.is_dir():
            return
        self._renewed = now
        try:
            self._wish.renew()
            self._problem = ""
        except OSError as error:
            self._problem = f"numbers cannot be asked for: {error.strerror or error}"

    def _read(self, file: Path, load: Callable[[Path], T]) -> T | None:
        """Return what a file holds, as it was before where it cannot be read just now."""
        known = self._known.get(file, (None, None))
        try:
            found = file.stat()
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
            if stamp != known[0]:
                known = self._known[file] = (stamp, load(file))
        except (OSError, NanstopError):
            pass
        return known[1]

    def _quiet(self, now: float) -> float:
        if self._changed is not None:
            return now - self._changed
        if self._told.at:
            return max(self._wall() - self._told.at, 0.0)
        return now - self._began

    def _stage(self, now: float) -> Stage | None:
        stage = self._told.stage
        name = stage.get("stage")
        if not name:
            return None
        most = _number(stage.get("seconds"))
        waited = now - self._changed if self._changed is not None else 0.0
        spent = self._told.at - self._told.stage_at + waited
        return Stage(
            name=str(name),
            step=int(_number(stage.get("of")) or 0),
            tried=int(_number(stage.get("tried")) or 0),
            trials=int(_number(stage.get("trials")) or 0),
            best=str(stage.get("best") or ""),
            seconds_left=None if most is None else max(most - spent, 0.0),
        )

    def _series(self, reports: Sequence[Report]) -> dict[str, list[Point]]:
        kept = self._read(self.folder / SERIES, load_series) or ()
        rows = self._told.rows.items()
        live = (Series(name=n, steps=_column(r, 0), values=_column(r, 1)) for n, r in rows)
        return run_series(reports, (*live, *kept))


def _column(rows: Sequence[Point], at: int) -> tuple[Any, ...]:
    return tuple(row[at] for row in rows)


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def is_run(folder: Path) -> bool:
    """Return whether a folder holds what a run leaves, or what one is to leave."""
    return any((folder / name).is_file() for name in (SUMMARY, LIVE))


def run_folders(folders: Sequence[Path]) -> dict[Path, str]:
    """Return the folders of runs with their names: of each of ``folders`` itself, else those
    directly below it that hold a run; itself again where there is none yet.
    """
    found: dict[Path, str] = {}
    for folder in folders:
        below: list[Path] = []
        with suppress(OSError):
            below = sorted(one for one in folder.iterdir() if one.is_dir() and is_run(one))
        if is_run(folder) or not below:
            found[folder] = folder.resolve().name
        else:
            found |= {one: one.name for one in below}
    names = list(found.values())
    return {f: str(f) if names.count(name) > 1 else name for f, name in found.items()}
