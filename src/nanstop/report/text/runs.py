"""The runs of an incident folder, in a few lines each."""

from __future__ import annotations

import time
from collections.abc import Sequence

from nanstop.records import Report
from nanstop.report.text.blocks.incident import DONE
from nanstop.store.summary import FindingRow, Summary
from nanstop.wording import counted, number, spans, typed

_ENDS = {
    "clean": "ended well",
    "stopped": "stopped by nanstop",
    "exception": "ended by an exception",
    "nonfinite": "ended by an exception after a failure",
    "signal": "killed by a signal",
    "oom_killed": "killed for its memory",
    "out_of_memory": "out of memory",
    "hang": "hung",
}


def render_runs(folder: str, reports: Sequence[Report], summary: Summary | None) -> str:
    """Return the latest run, which ``summary`` is of, then the incidents of earlier ones by day and
    script.
    """
    latest = {row.folder for row in summary.incidents} if summary is not None else set[str]()
    lines: list[str] = []
    if summary is not None:
        own = [one for one in reports if one.incident.id in latest]
        head = _began(own) if own else _when(summary.began, summary.script, "%Y-%m-%d %H:%M")
        lines += [f"{head}{totals(summary)}", *map(_incidents, _by_failure(own))]
        lines += [line for row in summary.findings for line in _finding(row)]
    told = ""
    earlier = [one for one in reports if one.incident.id not in latest]
    for alike in reversed(_by_failure(earlier)):
        head = _began(alike, before=True)
        lines += [head] if head != told else []
        lines.append(_incidents(alike))
        told = head
    first = reports[-1].incident.id if reports else ""
    more = (
        f"note: `nanstop report {typed(f'{folder}/{first}')}` shows one, "
        f"`nanstop report --full {typed(folder)}` all"
    )
    return "\n".join([*lines, *([more] if reports else [])])


def _began(reports: Sequence[Report], *, before: bool = False) -> str:
    """Return when and what was run, as the first incident says it."""
    incident = reports[0].incident
    form = "%Y-%m-%d" if before else "%Y-%m-%d %H:%M"
    command = incident.environment.command
    script = command.script_name if command is not None else None
    return _when(incident.time, script, form, "earlier" if before else "")


def _when(time_of: float | None, script: str | None, form: str, tail: str = "") -> str:
    """Return a date and a script as the begin of a line; "" where neither is known."""
    if time_of is None and script is None:
        return ""
    when = time.strftime(form, time.localtime(time_of)) if time_of else "no date"
    said = "  ".join(part for part in (when, script, tail) if part)
    return said if tail else f"{said}  "


def totals(summary: Summary) -> str:
    """Return how long a run was, how it ended, and how much was found."""
    took = f"{counted(summary.steps, 'step')} in {number(round(summary.seconds, 1))} s"
    end = _ENDS.get(summary.ended or "", summary.ended)
    if not end and summary.exit is not None:
        end = "ended well" if summary.exit == 0 else f"ended with exit code {summary.exit}"
    if summary.trained_nothing:
        end = "nothing was trained" if end == "ended well" else f"{end}, nothing was trained"
    warnings = [one for one in summary.findings if not one.mended_by]
    found = [
        counted(len(rows), name)
        for rows, name in ((summary.incidents, "incident"), (warnings, "warning"))
        if rows
    ]
    return ", ".join([took, end or "not over", " and ".join(found) or "nothing found"])


def _by_failure(reports: Sequence[Report]) -> list[list[Report]]:
    """Return the incidents of a run, those together that several ranks have had in one step."""
    found: dict[tuple[object, ...], list[Report]] = {}
    for report in reports:
        at, best = report.incident.at, report.diagnoses[0] if report.diagnoses else None
        place = report.localization.key if report.localization is not None else None
        failure = (at.run, at.step, best and (best.code, best.title), place)
        alone = not any(one.incident.at.rank == at.rank for one in found.get(failure, ()))
        found.setdefault(failure if alone else (report.incident.id,), []).append(report)
    return list(found.values())


def _incidents(alike: Sequence[Report]) -> str:
    """Return the line of one failure, which ``alike`` ranks have each met."""
    line = _incident(alike[0])
    if len(alike) == 1:
        return line
    ranks = spans(one.incident.at.rank for one in alike)
    return f"{line}  on {len(alike)} ranks ({ranks}), until {alike[-1].incident.id}"


def _incident(report: Report) -> str:
    best = report.diagnoses[0] if report.diagnoses else None
    code, title = (best.code, best.title) if best is not None else ("NS000", "not diagnosed")
    times = f", {report.count} times" if report.count > 1 else ""
    done = f"  {DONE[report.audit[-1].action.kind]}" if report.audit else ""
    step = report.incident.at.step
    return f"  {report.incident.id}  error[{code}] {title}  first at step {step}{times}{done}"


def _finding(row: FindingRow) -> list[str]:
    """Return a warning, and below it what it means and what to do: there is no incident that would
    say it.
    """
    head = f"        warning[{row.code}] {row.title}{f'  {row.where}' if row.where else ''}"
    said = () if row.mended_by else (row.cause, *row.lines)
    return [head, *(f"          {one}" for one in said if one)]
