"""Where incidents live.

One numbered folder each with ``report.json``, a ``summary.json`` of the run, a ``plan.yaml``.

Writing never fails a run: the first problem of the disk is logged, kept in ``Store.problem``, and
from then on the store remembers in memory. Every file appears whole or not at all. Reading trusts
nothing: size, schema, links and names are looked at before anything is used.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from nanstop.errors import NanstopError, unknown
from nanstop.ranks import is_first
from nanstop.records import Atom, PrecisionPlan, Report, Series, codec
from nanstop.store.files import (
    MAX_JSON_BYTES,
    load_record,
    locked,
    read_text,
    write_whole,
)
from nanstop.store.live_file import LIVE
from nanstop.store.summary import RecordedSeries, Summary, merge, quiet_summary, says_more
from nanstop.wording import typed

REPORT = "report.json"
SUMMARY = "summary.json"
SERIES = "series.json"
PLAN = "plan.yaml"
PATCH = "fix.diff"
"""What was changed in the user's files for an incident, in its folder."""
PAGE = "report.html"
"""The page of a run, beside its incidents."""

_ID = re.compile(r"\d{4,9}")
_log = logging.getLogger("nanstop")

T = TypeVar("T")


class Store:
    """The incident folder of a run.

    With ``run_id`` several processes share one run: each keeps the others' incidents when it writes
    the summary, so whoever starts the run writes the first one with ``reset``. Without it the store
    owns the summary. ``keeps_series``: the numbers of the whole run are wanted, for ``nanstop
    compare``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        run_id: str | None = None,
        *,
        keeps_series: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self.run_id = run_id
        self.keeps_series = keeps_series
        self.problem: str | None = None
        self.own: set[str] = set()
        """Ids that were given here: those of others are written by who opened them."""
        self.reports: dict[str, Report] = {}
        self.summary = Summary()
        self._on_disk = Summary()
        """What is in ``summary.json`` unless another process wrote it; empty as a run begins."""
        self._last_number = -1

    def open_incident(self) -> tuple[str, Path]:
        """Return a new id ("0007") and its folder, which no other process was given.

        The folder does not exist where the disk refused it; then ``problem`` is set.
        """
        number = self._guarded(self._make_folder)
        self._last_number = self._last_number + 1 if number is None else number
        incident_id = f"{self._last_number:04d}"
        self.own.add(incident_id)
        return incident_id, self.folder / incident_id

    def write_report(self, report: Report) -> None:
        """Write ``report.json`` into the folder of its incident, in the place of an earlier."""
        incident_id = report.incident.id
        if not _ID.fullmatch(incident_id):
            raise NanstopError(f"incident id `{incident_id}` was not given by open_incident")
        self.reports[incident_id] = report
        text = codec.to_json(report)
        self._guarded(lambda: write_whole(self.folder / incident_id / REPORT, text.encode()))

    def reset(self) -> None:
        """Start a run: replace whatever summary an earlier one left."""
        self.summary = Summary()
        self._guarded(self._begin)

    def write_summary(self, summary: Summary) -> None:
        """Replace ``summary.json`` by this state of the run, merged with other processes'."""
        self.summary = summary
        self._guarded(self._write_summary)

    @property
    def merged(self) -> Summary:
        """The summary as it was written last, with what other processes of the run had written."""
        return self._on_disk

    @property
    def has_news(self) -> bool:
        """Whether anything was met or found, here or in another process of the run."""
        merged = self.merged
        return bool(self.reports or merged.incidents or merged.findings)

    def present_summary(self) -> Summary:
        """Return what ``summary.json`` holds, not validated. Errors: as ``load_report``."""
        path = self.folder / SUMMARY
        text = read_text(path, MAX_JSON_BYTES)
        if text == codec.to_json(self._on_disk):
            return self._on_disk
        return quiet_summary(text) or load_summary(path)

    def write_series(self, series: tuple[Series, ...]) -> None:
        """Write the numbers of a run as ``series.json``; of several sessions the last counts."""
        text = codec.to_json(RecordedSeries(series=series))
        self._guarded(lambda: write_whole(self.folder / SERIES, text.encode()))

    def save_plan(self, atoms: tuple[Atom, ...]) -> None:
        """Write the adopted remedies as ``plan.yaml``."""
        from nanstop.store.plan_file import save_plan

        plan = PrecisionPlan(remedies=atoms)
        self._guarded(lambda: save_plan(plan, self.folder / PLAN))

    def _guarded(self, write: Callable[[], T]) -> T | None:
        """Return what ``write`` returns; None once the disk has failed."""
        if self.problem is not None:
            return None
        try:
            return write()
        except OSError as error:
            self.problem = f"cannot write {self.folder}: {error.strerror or error}"
            _log.warning("nanstop: %s; incidents are kept in memory only", self.problem)
            return None

    def _make_folder(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        taken = [int(entry.name) for entry in self.folder.iterdir() if _ID.fullmatch(entry.name)]
        numbers = itertools.count(max(taken, default=-1) + 1)
        return next(
            number for number in numbers if _make_exclusively(self.folder / f"{number:04d}")
        )

    def _begin(self) -> None:
        for left in (SERIES, LIVE, PAGE):
            (self.folder / left).unlink(missing_ok=True)
        self._put_summary(self.summary)

    def _write_summary(self) -> None:
        shares = self.run_id is not None
        if shares and not is_first() and not says_more(self.summary, self._present()):
            return  # of thousands of healthy ranks only the first has something to write
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder):
            merged = merge(self.summary, self._present()) if shares else self.summary
            self._put_summary(merged)

    def _present(self) -> Summary:
        """Return what is in ``summary.json``, an empty one where that is missing or damaged."""
        try:
            return self.present_summary()
        except NanstopError:
            return Summary()

    def _put_summary(self, summary: Summary) -> None:
        write_whole(self.folder / SUMMARY, codec.to_json(summary).encode())
        self._on_disk = summary


def load_report(path: str | os.PathLike[str]) -> Report:
    """Return the report of an incident folder (or of a ``report.json``) that anybody may have
    written.

    Errors: ``NanstopError`` NS001 for a missing, linked, oversized or malformed file, another
    schema, or an id that leaves the folder.
    """
    given = Path(path)
    file = given / REPORT if given.is_dir() else given
    report = load_record(file, Report)
    if not _ID.fullmatch(report.incident.id):
        raise NanstopError(f"{file}: `{report.incident.id}` is no id of an incident")
    return report


def load_series(path: str | os.PathLike[str]) -> tuple[Series, ...]:
    """Return the series of a ``series.json`` of anybody's. Errors: as ``load_report``."""
    return load_record(Path(path), RecordedSeries).series


def load_summary(path: str | os.PathLike[str]) -> Summary:
    """Return a ``summary.json`` that anybody may have written. Errors: as ``load_report``."""
    return load_record(Path(path), Summary)


def _is_a_runs(folder: Path) -> bool:
    """Return whether a run has left something in a folder, or it is that of an incident."""
    left = (folder / name for name in (SUMMARY, REPORT))
    return any(one.is_file() for one in left) or any(
        _ID.fullmatch(one.name) and (one / REPORT).is_file()
        for one in (folder.iterdir() if folder.is_dir() else ())
    )


def incident_folders(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return ``path`` if it holds a report, else the incident folders directly below it, oldest
    first.

    Errors: ``NanstopError`` NS001 where there is none, with the nearest folder that exists.
    """
    folder = Path(path)
    if folder.is_file() or (folder / REPORT).is_file():
        return (folder,)
    if not folder.is_dir():
        parent = folder.parent if folder.parent.is_dir() else Path()
        siblings = sorted(str(parent / one.name) for one in parent.iterdir() if _is_a_runs(one))
        raise unknown("incident folder", str(folder), siblings)
    found = [
        one for one in folder.iterdir() if _ID.fullmatch(one.name) and (one / REPORT).is_file()
    ]
    if not found:
        hint = "a run that met no failure leaves none; `nanstop run --out DIR` says where they go"
        if (folder / SUMMARY).is_file():
            hint = f"its run met no failure: `nanstop report {typed(folder)}` says how it ended"
        raise NanstopError(f"no incident in {folder}", hint=hint)
    return tuple(sorted(found, key=lambda one: int(one.name)))


def _make_exclusively(folder: Path) -> bool:
    """Make a folder; False where it is there already: exactly one of several gets True."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
