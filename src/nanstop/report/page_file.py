"""The page of a run beside its incidents, written when the run is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanstop.records import PrecisionPlan, Report, Series
from nanstop.store.files import write_whole
from nanstop.store.incidents import PAGE, REPORT, SUMMARY, Store, load_report, load_summary

if TYPE_CHECKING:
    from nanstop.report.html.run_record import RunRecord

_log = logging.getLogger("nanstop")


def write_page(
    store: Store,
    series: Callable[[], Sequence[Series]],
    plan: PrecisionPlan | None = None,
) -> None:
    """Write ``report.html`` of a run that had something to say, with its last numbers as
    ``series.json``.

    ``series`` reads them, which may synchronise a device. Without an incident or a finding, of this
    process or of another that shares the run, and where the disk has failed, nothing is done or
    imported. Never raises: what goes wrong is one line in the log.
    """
    if store.problem is None and store.has_news:
        _guarded(lambda: _write(store, tuple(series()), plan))


def write_folder_page(folder: Path) -> None:
    """Write ``report.html`` of the last run in a folder, from what lies there. Never raises."""
    _guarded(lambda: _write_folder(folder))


def _guarded(write: Callable[[], None]) -> None:
    try:
        write()
    except Exception as error:
        kind = type(error).__name__
        _log.warning("nanstop: the page of this run was not written (%s: %s)", kind, error)


def _write(store: Store, series: tuple[Series, ...], plan: PrecisionPlan | None) -> None:
    from nanstop.report.html.run_record import RunRecord

    if not store.keeps_series:
        store.write_series(series)
    if any(row.folder not in store.reports for row in store.merged.incidents):
        _write_folder(store.folder, plan)  # an incident of another rank
        return
    reports: tuple[Report, ...] = tuple(store.reports.values())
    run = RunRecord(
        reports=reports,
        records=tuple(_record(store.folder, one.incident.id) for one in reports),
        summary=store.merged,
        series=series,
        plan=plan,
    )
    _put(store.folder, run)


def _write_folder(folder: Path, plan: PrecisionPlan | None = None) -> None:
    from nanstop.report.html.run_record import run_record

    rows = load_summary(folder / SUMMARY).incidents
    reports = [load_report(folder / row.folder) for row in rows]
    records = [_record(folder, one.incident.id) for one in reports]
    run = run_record(folder, reports, records)
    _put(folder, run if plan is None else replace(run, plan=plan))


def _put(folder: Path, run: RunRecord) -> None:
    from nanstop.report.html.page import html_page

    write_whole(folder / PAGE, html_page(run).encode(errors="replace"))


def _record(folder: Path, incident_id: str) -> str:
    path, here = folder / incident_id / REPORT, Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
