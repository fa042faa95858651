"""A run that is followed as the parts of a page; a part that has not changed is the same text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nanstop.commands.view.followed import RunNow
from nanstop.language.choice import language
from nanstop.records import Report, RunFacts
from nanstop.report.html.charts import MISSING, are_available
from nanstop.report.html.explained import explained
from nanstop.report.html.headroom import heat_map
from nanstop.report.html.incident import BATCH_COLUMNS, PROOF_COLUMNS, IncidentParts, incident_parts
from nanstop.report.html.labels import labels
from nanstop.report.html.templates import FOLDER as SHARED
from nanstop.report.html.templates import policy_hash, template, trusted
from nanstop.report.html.timeline import COLUMNS, panels
from nanstop.report.text.progress import stage_lines
from nanstop.report.text.spoken import spoken
from nanstop.store.summary import Summary
from nanstop.wording import counted

FOLDER = Path(__file__).parent / "page"
MOST_SHOWN = 6
"""Incidents that are shown whole; of others there is a line."""
_QUIET_SECONDS = 30.0


def shell(token_path: str) -> str:
    """Return the page that the parts come into. ``token_path``: what its addresses begin with."""
    lang = language()
    style = (SHARED / "page.css").read_text() + (FOLDER / "view.css").read_text()
    script = (SHARED / "copy.js").read_text() + (FOLDER / "view.js").read_text()
    return template("view.html.jinja", FOLDER).render(
        style=trusted(style),
        script=trusted(script),
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
        base=token_path,
        lang=lang,
        say=labels(lang),
    )


def run_parts(run: RunNow, key: str, page: str, *, is_alone: bool = True) -> Mapping[str, str]:
    """Return the parts of a run by the id of their place, in order. ``key``: of the run, unique.
    ``page``: the address of its report. ``is_alone``: not beside others, whose charts are to stand
    at the same height: then its newest incident is open.
    """
    draw, lang = are_available(), language()
    say = labels(lang)
    reports = run.reports
    shown = reports[-MOST_SHOWN:][::-1]
    facts = reports[-1].incident.facts if reports else RunFacts()
    incidents = tuple(_incidents(shown, key))
    known = (
        explained(code, lang) for code in dict.fromkeys(parts.code for _, _, parts in incidents)
    )
    fixes = {one.code: one.fix for one in known if one is not None}
    given = {
        "run": run,
        "key": key,
        "page": page if reports else "",
        "state": _state(run),
        "said": _said(run),
        "stage": tuple(stage_lines(run.stage)) if run.stage is not None else (),
        "bar": run.stage,
        "incidents": incidents,
        "others": tuple(_headline(report) for report in reports[:-MOST_SHOWN]),
        "findings_rows": tuple(_finding_rows(run.summary)),
        "panels": tuple(panels(run.series, reports, draw=draw, name=f"{key}-series", say=say)),
        "heat": heat_map(run.series, facts),
        "is_alone": is_alone,
        "missing": "" if draw else MISSING,
        "proof_columns": PROOF_COLUMNS,
        "batch_columns": BATCH_COLUMNS,
        "series_columns": COLUMNS,
        "say": say,
        "fixes": fixes,
    }
    names = ("state", "stage", "incidents", "charts")
    return {
        f"{key}-{name}": template(f"{name}.html.jinja", FOLDER).render(given).strip()
        for name in names
    }


def _incidents(reports: Sequence[Report], key: str) -> Iterator[tuple[str, str, IncidentParts]]:
    """Yield id, headline and parts of each incident."""
    for at, report in enumerate(reports):
        name = f"{key}-operand-{at}"
        parts = incident_parts(report, None, name=name, draw=False, show_text=False)
        blocks = tuple(spoken(parts.blocks))
        yield report.incident.id, _headline(report), replace(parts, blocks=blocks)


def _finding_rows(summary: Summary | None) -> Iterator[tuple[str, str, str]]:
    """Yield code, title and step of each finding, "" where it has no step."""
    for one in summary.findings if summary is not None else ():
        yield one.code, one.title, "" if one.step is None else str(one.step)


def _state(run: RunNow) -> tuple[str, str]:
    """Return the class of a run's state and its word."""
    summary = run.summary
    if run.is_over:
        ended = summary.ended if summary is not None else None
        bad = summary is not None and bool(summary.exit)
        return ("bad" if bad else "over"), (ended or ("failed" if bad else "over")).replace(
            "_", " "
        )
    if run.stage is not None:
        return "busy", "investigating"
    if summary is None and not run.steps:
        return "waiting", "waiting for a run"
    if run.quiet_seconds > _patience(run):
        return "waiting", f"no news for {_span(run.quiet_seconds)}"
    return "going", "training" if run.steps else "begun"


def _patience(run: RunNow) -> float:
    return max(_QUIET_SECONDS, 10.0 * (run.pace or 0.0))


def _said(run: RunNow) -> str:
    said = [f"{counted(run.steps, 'step')}"]
    if run.pace is not None and not run.is_over:
        fast = run.pace < 1.0
        said.append(f"{1 / run.pace:.2g} steps a second" if fast else f"{run.pace:.2g} s a step")
    left_out = run.series.get("skipped")
    if left_out:
        said.append(f"{counted(int(left_out[-1][1]), 'update')} skipped")
    if run.host:
        said.append(run.host)
    if run.is_over and run.summary is not None and run.summary.seconds:
        said.append(f"took {_span(run.summary.seconds)}")
    return ", ".join(said)


def _span(seconds: float) -> str:
    if seconds < 10:
        return "a few seconds"
    if seconds < 90:
        return f"{int(seconds // 10) * 10} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{round(seconds / 3600)} h"


def _headline(report: Report) -> str:
    best = report.diagnoses[0] if report.diagnoses else None
    what = f"{best.code}: {best.title}" if best is not None else "not diagnosed"
    said = [what, f"step {report.incident.at.step}"]
    said += [f"seen {report.count} times"] if report.count > 1 else []
    return ", ".join(said)
