"""What a page is made from: incidents, and what their run left beside them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nanstop.errors import NanstopError
from nanstop.records import PrecisionPlan, Report, Series
from nanstop.store.incidents import PLAN, SERIES, SUMMARY, load_series, load_summary
from nanstop.store.plan_file import load_plan
from nanstop.store.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """``records``: the path of each report's ``report.json``, or None, to point to.
    ``earlier``: incidents of other runs in the same folder, whose numbers are not this run's.
    """

    reports: tuple[Report, ...] = ()
    records: tuple[str | None, ...] = ()
    earlier: tuple[Report, ...] = ()
    summary: Summary | None = None
    series: tuple[Series, ...] = ()
    plan: PrecisionPlan | None = None

    def record_of(self, at: int) -> str | None:
        """Return the path of a report's file, None where it is not known."""
        return self.records[at] if at < len(self.records) else None


def run_record(folder: Path, reports: Sequence[Report], records: Sequence[str | None]) -> RunRecord:
    """Return incidents with what lies in ``folder``, their run's. What is missing or damaged there
    is left out.

    Where ``summary.json`` is of a run that has none of the incidents, the newest of them stands
    alone.
    """
    summary = None
    with suppress(NanstopError):
        summary = load_summary(folder / SUMMARY)
    own = {row.folder for row in summary.incidents} if summary is not None else set[str]()
    known = list(zip(reports, records, strict=True))
    shown = [one for one in known if one[0].incident.id in own]
    if summary is None:
        return RunRecord(reports=tuple(reports), records=tuple(records))
    if known and not shown:
        newest, record = known[-1]
        return RunRecord(reports=(newest,), records=(record,), earlier=tuple(reports[:-1]))
    series, plan = (), None
    with suppress(NanstopError):
        series = load_series(folder / SERIES)
    with suppress(NanstopError):
        plan = load_plan(folder / PLAN)
    return RunRecord(
        reports=tuple(report for report, _ in shown),
        records=tuple(record for _, record in shown),
        earlier=tuple(report for report in reports if report.incident.id not in own),
        summary=summary,
        series=series,
        plan=plan,
    )
