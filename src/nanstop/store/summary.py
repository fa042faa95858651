"""``summary.json``: one run in a few lines, rewritten while it goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, cast

from nanstop.records import SCHEMA, Diagnosis, Report, Series, Sighting
from nanstop.records.record import record
from nanstop.records.remedies import describe
from nanstop.records.vocabulary import DEATHS, RANK, Confidence, Phase


@record
class IncidentRow:
    """One incident in ``summary.json``. ``source``: "file:line". Steps count from 0."""

    code: str
    codes: tuple[str, ...]
    title: str
    phase: str
    op: str | None
    module: str | None
    source: str | None
    step: int
    micro: int | None
    rank: int
    confidence: str | None
    verdict: str | None
    remedy: str | None
    action: str | None
    count: int
    folder: str


@record
class FindingRow:
    """What preflight or the gauge found: silently wrong or about to fail, but no failure.

    ``step`` and ``micro`` (from 0), ``phase``, ``op``: where it was first seen, as far as that was
    measured. ``step`` is None for what was only to be expected. ``cause`` and ``lines``: what the
    terminal says of it. ``mended_by``: see ``Diagnosis``.
    """

    code: str
    title: str
    where: str
    confidence: str
    step: int | None = None
    micro: int | None = None
    phase: str | None = None
    op: str | None = None
    cause: str = ""
    lines: tuple[str, ...] = ()
    mended_by: str = ""


@record
class Summary:
    """``summary.json``: the whole run.

    ``exit`` is None while it goes on; ``steps`` are optimizer steps.

    ``ended``: "stopped" after a training that nanstop stopped; at last, how ``nanstop run`` saw its
    command end (``process.crash.process_end.EndKind``). Else None. ``began``: seconds since 1970.
    ``script``: the name of its file; both None where they are not known.
    """

    schema: int = SCHEMA
    incidents: tuple[IncidentRow, ...] = ()
    findings: tuple[FindingRow, ...] = ()
    exit: int | None = None
    steps: int = 0
    seconds: float = 0.0
    ended: str | None = None
    began: float | None = None
    script: str | None = None
    trained_nothing: bool = False
    """Whether every update was skipped, of each optimizer."""


@record
class RecordedSeries:
    """``series.json``: losses, norms and rates of a whole run that was asked for them; of a run
    that met an incident the last ones.
    """

    schema: int = SCHEMA
    series: tuple[Series, ...] = ()


def quiet_summary(text: str) -> Summary | None:
    """Return the summary of a run that has met nothing, None for any other text.

    Read and looked at without pydantic, whose import takes longer than all else that a healthy run
    asks of its parent.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or values.keys() != _QUIET.keys():
        return None
    if not all(type(values[name]) in kinds for name, kinds in _QUIET.items()):
        return None
    if values["schema"] != SCHEMA or values["incidents"] or values["findings"]:
        return None
    known: dict[str, Any] = {**values, "incidents": (), "findings": ()}
    return Summary(**known)


_IN_JSON: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
    "str | None": (str, type(None)),
    "tuple": (list,),
}
"""Of what kinds the values of a field are in JSON, by its annotation up to a bracket."""
_QUIET = {one.name: _IN_JSON[str(one.type).partition("[")[0]] for one in fields(Summary)}


def summary_of(
    reports: Iterable[Report], findings: Iterable[Diagnosis], *, stopped: bool, **run: Any
) -> Summary:
    """Return the summary of a run with these incidents and findings; ``run``: its other fields."""
    return Summary(
        incidents=tuple(map(summary_row, reports)),
        findings=tuple(map(finding_row, findings)),
        ended="stopped" if stopped else None,
        **run,
    )


def summary_row(report: Report) -> IncidentRow:
    """Return the line of ``summary.json`` that this report amounts to."""
    first = report.diagnoses[0] if report.diagnoses else None
    place = report.localization
    event = place.first_bad if place else None
    if event is None and place is not None and place.key.kind in DEATHS and place.growth:
        event = place.growth[-1]
    key = place.key if place else (report.replay.key if report.replay else None)
    proof, at = report.proof, report.incident.at
    source = event.source if event else first.source if first else None
    return IncidentRow(
        code=first.code if first else "NS000",
        codes=tuple(diagnosis.code for diagnosis in report.diagnoses) or ("NS000",),
        title=first.title if first else "",
        phase=event.phase if event else key.phase if key else report.incident.phase,
        op=(event.op if event else key.op if key else "") or None,
        module=(event.module if event else key.module if key else "") or None,
        source=f"{source.file}:{source.line}" if source else None,
        step=at.step,
        micro=at.micro,
        rank=at.rank,
        confidence=first.confidence if first else None,
        verdict=proof.verdict if proof else None,
        remedy=describe(proof.minimal) if proof and proof.minimal else None,
        action=report.audit[-1].action.kind if report.audit else None,
        count=report.count,
        folder=report.incident.id,
    )


def finding_row(finding: Diagnosis) -> FindingRow:
    """Return the line of ``summary.json`` that this finding amounts to."""
    seen = finding.seen
    return FindingRow(
        code=finding.code,
        title=finding.title,
        where=finding.where,
        confidence=finding.confidence,
        step=seen.step if seen is not None else None,
        micro=seen.micro if seen is not None else None,
        phase=seen.phase if seen is not None else None,
        op=seen.op if seen is not None else None,
        cause=finding.cause,
        lines=finding.lines,
        mended_by=finding.mended_by,
    )


def finding_of(row: FindingRow) -> Diagnosis:
    """Return the finding that a line of ``summary.json`` is of, as far as the line has it."""
    seen = None
    if row.step is not None:
        seen = Sighting(
            step=row.step, micro=row.micro, phase=cast(Phase | None, row.phase), op=row.op
        )
    return Diagnosis(
        code=row.code,
        title=row.title,
        cause=row.cause,
        confidence=cast(Confidence, row.confidence),
        lines=row.lines,
        mended_by=row.mended_by,
        where=row.where,
        seen=seen,
    )


def by_weight(row: FindingRow) -> tuple[bool, int, int]:
    """Sort by this: the measured before the expected, the more certain first, the earlier."""
    return row.step is None, RANK[row.confidence], row.step or 0


def merge(own: Summary, other: Summary) -> Summary:
    """Return this process's summary with the rows of the others, which have own folders."""
    mine = {row.folder for row in own.incidents}
    rows = (*own.incidents, *(row for row in other.incidents if row.folder not in mine))
    return replace(
        own,
        incidents=tuple(sorted(rows, key=lambda row: row.folder)),
        findings=_standing((*own.findings, *other.findings)),
        ended=own.ended if own.exit is not None else other.ended,
        exit=own.exit if own.exit is not None else other.exit,
        steps=max(own.steps, other.steps),
        seconds=max(own.seconds, other.seconds),
        began=min((one for one in (own.began, other.began) if one is not None), default=None),
        script=own.script or other.script,
    )


def says_more(own: Summary, other: Summary) -> bool:
    """Return whether a process has anything to add to a summary but how long it ran."""
    merged = merge(own, other)
    rows = merged.incidents != other.incidents or _named(merged) != _named(other)
    return rows or own.exit not in {None, 0} or own.ended not in {None, other.ended}


def _named(summary: Summary) -> list[FindingRow]:
    """Return the findings without what each rank says in numbers of its own."""
    return [replace(row, cause="", lines=()) for row in summary.findings]


def _standing(findings: tuple[FindingRow, ...]) -> tuple[FindingRow, ...]:
    """Return each finding once: as it was measured, not as it was only expected."""
    measured = {row.code for row in findings if row.step is not None}
    kept: dict[tuple[str, str, str], FindingRow] = {}
    for row in sorted(findings, key=by_weight):
        if row.step is not None or row.code not in measured:
            kept.setdefault((row.code, row.title, row.where), row)
    return tuple(kept.values())
