"""A run's incidents as one HTML file that needs no network and no script."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from nanstop.language.choice import language
from nanstop.records import AuditEntry, Incident, Report, RunFacts
from nanstop.records.remedies import describe
from nanstop.report.html.charts import MISSING, are_available
from nanstop.report.html.explained import Explained, explained
from nanstop.report.html.headroom import HeatMap, heat_map
from nanstop.report.html.incident import (
    BATCH_COLUMNS,
    PROOF_COLUMNS,
    IncidentParts,
    Rows,
    incident_parts,
)
from nanstop.report.html.labels import labels
from nanstop.report.html.module_tree import Node
from nanstop.report.html.run_record import RunRecord
from nanstop.report.html.series import run_series
from nanstop.report.html.sheet import plan_tree
from nanstop.report.html.templates import FOLDER, policy_hash, template, trusted
from nanstop.report.html.timeline import COLUMNS, Panel, panels
from nanstop.report.text.about import about_machine, about_run
from nanstop.report.text.blocks.block import Block
from nanstop.report.text.blocks.finding import finding_blocks
from nanstop.report.text.runs import totals
from nanstop.report.text.spoken import spoken
from nanstop.store.plan_file import headline
from nanstop.store.summary import finding_of
from nanstop.wording import counted

MOST_INCIDENTS = 12
"""Incidents that are shown whole; of others a page has the headline."""
MOST_AUDITED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """What the template shows."""

    title: str
    happened: str
    incidents: tuple[IncidentParts, ...]
    others: tuple[str, ...]
    earlier: tuple[str, ...]
    panels: tuple[Panel, ...]
    heat: HeatMap | None
    plan: tuple[str, ...]
    plan_tree: Node | None
    findings: tuple[FoundParts, ...]
    environment: Rows
    audit: Rows
    explained: tuple[Explained, ...]
    fixes: dict[str, str]
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundParts:
    """A finding that is no failure, as the terminal tells it."""

    code: str
    blocks: tuple[Block, ...]


def html_page(
    run: RunRecord, *, show_text: bool = False, framed: bool = False, lang: str | None = None
) -> str:
    """Return the page. Every text is escaped; characters that do not print are replaced.

    ``show_text``: with the messages of exceptions, which may quote data. ``framed``: for a frame
    that runs no script, whose links would lead out of it. ``lang``: None for that which is asked
    for. Without the library that draws, the numbers stand in tables alone. Errors: ``ValueError``
    for a run of which nothing is known.
    """
    if not run.reports and run.summary is None:
        raise ValueError("a page is made of incidents or of a summary, and there is none")
    lang = lang or language()
    style = (FOLDER / "page.css").read_text()
    script = (FOLDER / "copy.js").read_text() + "addCopies(document);\n"
    return template("page.html.jinja").render(
        say=labels(lang),
        page=_page(run, show_text=show_text, lang=lang),
        lang=lang,
        style=trusted(style),
        script=None if framed else trusted(script),
        linked=not framed,
        style_hash=policy_hash(style),
        script_hash=policy_hash(script),
        proof_columns=PROOF_COLUMNS,
        batch_columns=BATCH_COLUMNS,
        series_columns=COLUMNS,
    )


def _page(run: RunRecord, *, show_text: bool, lang: str) -> RunPage:
    shown, rest = run.reports[:MOST_INCIDENTS], run.reports[MOST_INCIDENTS:]
    first = shown[0].incident if shown else None
    series = run_series(run.reports, run.series)
    draw, say = are_available(), labels(lang)
    incidents = tuple(
        incident_parts(
            report, run.record_of(at), name=f"operand-{at}", draw=draw, show_text=show_text, say=say
        )
        for at, report in enumerate(shown)
    )
    findings = tuple(_findings(run))
    incidents = tuple(replace(one, blocks=tuple(spoken(one.blocks, lang))) for one in incidents)
    findings = tuple(replace(one, blocks=tuple(spoken(one.blocks, lang))) for one in findings)
    codes = dict.fromkeys(one.code for one in (*incidents, *findings))
    known = tuple(filter(None, (explained(code, lang) for code in codes)))
    return RunPage(
        title=say(_title(run)),
        happened=say(_happened(run)),
        incidents=incidents,
        others=tuple(_headline(report) for report in rest[:MOST_AUDITED]),
        earlier=tuple(_headline(report) for report in run.earlier[-MOST_AUDITED:]),
        panels=tuple(panels(series, run.reports, draw=draw, say=say)),
        heat=heat_map(series, first.facts if first is not None else RunFacts()),
        plan=tuple(headline(run.plan)) if run.plan is not None else (),
        plan_tree=plan_tree(run.plan) if run.plan is not None else None,
        findings=findings,
        environment=tuple(_environment(first)) if first is not None else (),
        audit=tuple(
            _audited(one, say) for report in run.reports for one in report.audit[:MOST_AUDITED]
        )[:MOST_AUDITED],
        explained=known,
        fixes={one.code: one.fix for one in known},
        problem="" if draw else MISSING,
    )


def _title(run: RunRecord) -> str:
    if run.reports:
        best = run.reports[0].diagnoses
        return best[0].title if best else "not diagnosed"
    found = run.summary.findings if run.summary is not None else ()
    return found[0].title if found else "nothing found"


def _happened(run: RunRecord) -> str:
    if run.summary is None:
        return counted(len(run.reports), "incident")
    return totals(run.summary)


def _headline(report: Report) -> str:
    best = report.diagnoses[0] if report.diagnoses else None
    what = f"error[{best.code}]: {best.title}" if best is not None else "not diagnosed"
    return f"{report.incident.id}: {what}, step {report.incident.at.step}"


def _findings(run: RunRecord) -> Iterator[FoundParts]:
    found = run.summary.findings if run.summary is not None else ()
    for one in found[:MOST_AUDITED]:
        yield FoundParts(code=one.code, blocks=finding_blocks(finding_of(one)))


def _environment(incident: Incident) -> Rows:
    env = incident.environment
    script = env.command.script if env.command is not None else None
    rows = [*about_machine(env), *about_run(incident.facts)]
    rows += [("script", script)] if script else []
    rows += [(name, str(value)) for name, value in (*env.flags, *env.env_vars) if value]
    return tuple(rows)


def _audited(entry: AuditEntry, say: Callable[[str], str]) -> tuple[str, ...]:
    at, action = entry.at, entry.action
    micro = "" if at.micro is None else str(at.micro)
    what = say(action.kind) + (f": {say(describe(action.atoms))}" if action.atoms else "")
    return (
        *(entry.incident or "", str(at.step), micro, str(at.rank), what),
        *map(say, (action.reason, entry.outcome, entry.before, entry.after)),
    )
