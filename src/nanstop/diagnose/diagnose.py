"""Evidence -> diagnoses, best first. Pure: no torch, no files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.evidence.rule import Rule
from nanstop.records import Diagnosis, Evidence, Report
from nanstop.records.vocabulary import RANK

YIELDS: dict[str, tuple[str, ...]] = {
    "NS114": ("NS107",),
    "NS201": ("NS105", "NS202", "NS203", "NS404", "NS602"),
    "NS202": ("NS203",),
    "NS204": ("NS202", "NS203", "NS205", "NS206", "NS207", "NS404", "NS503", "NS602"),
    "NS205": ("NS503",),
    "NS207": ("NS702",),
    "NS301": ("NS105", "NS404", "NS602"),
    "NS304": ("NS404", "NS602"),
    "NS402": ("NS403",),
    "NS404": ("NS105",),
    "NS501": ("NS704",),
    "NS504": ("NS501", "NS502", "NS503"),
    "NS701": ("NS704",),
}
"""A general finding is withdrawn where one of these, more specific, says the same and is more than possible."""

SYMPTOMS = ("NS302", "NS305", "NS801", "NS802")
"""Findings that say how a failure shows, not what made it: listed after the cause."""

COMPANIONS: dict[str, tuple[str, ...]] = {
    "NS201": ("NS101", "NS108", "NS404", "NS504"),
    "NS202": ("NS108",),
    "NS203": ("NS108",),
    "NS204": ("NS108", "NS504"),
    "NS207": ("NS404", "NS504"),
    "NS209": ("NS101",),
    "NS301": ("NS101", "NS102", "NS103", "NS108", "NS404", "NS504"),
    "NS302": ("NS101", "NS102"),
    "NS304": ("NS108",),
    "NS401": ("NS105", "NS106"),
    "NS402": ("NS102", "NS103", "NS110", "NS113", "NS404"),
    "NS601": ("NS108",),
    "NS602": ("NS108",),
}
"""Standing facts that can have caused a failure, named beside it."""


@dataclass(frozen=True, slots=True)
class Examination:
    """``failures``: rules that raised, with the reason."""

    diagnoses: tuple[Diagnosis, ...]
    failures: tuple[str, ...]


def diagnose(evidence: Evidence, when: str) -> tuple[Diagnosis, ...]:
    """Return what the rules of kind ``when`` (static, incident, gauge) conclude, best first.

    An incident without any other cause has NS000. A rule that raises is left out (see ``examine``).
    """
    return examine(evidence, when).diagnoses


def examine(evidence: Evidence, when: str, catalogue: Sequence[Rule] = CATALOGUE) -> Examination:
    """Return ``diagnose``'s answer together with the rules that raised."""
    failures: list[str] = []
    found = _run((rule for rule in catalogue if when in rule.when), evidence, failures)
    kept = _withdraw(found)
    wanted = {code for diagnosis in kept for code in COMPANIONS.get(diagnosis.code, ())}
    wanted -= {diagnosis.code for diagnosis in kept}
    beside = _run((rule for rule in catalogue if rule.code in wanted), evidence, failures)
    ordered = (*sorted(kept, key=_order), *sorted(beside, key=_order))
    return Examination(tuple(_attach(one, ordered) for one in ordered), tuple(failures))


def diagnose_anew(report: Report) -> Report:
    """Return the report with today's diagnoses; the old ones stay where the records hold too little for a new one."""
    incident = report.incident
    evidence = Evidence(
        facts=incident.facts,
        incident=incident,
        replay=report.replay,
        localization=report.localization,
        series=incident.history,
        trials=report.proof.tried if report.proof else (),
    )
    fresh = diagnose(evidence, "incident")
    if fresh[0].code == "NS000" and report.diagnoses:
        return report
    return replace(report, diagnoses=fresh)


def _run(rules: Iterable[Rule], evidence: Evidence, failures: list[str]) -> list[Diagnosis]:
    found = []
    for rule in rules:
        try:
            diagnosis = rule.check(evidence)
        except Exception as error:  # evidence may come from an old or damaged file
            failures.append(f"{rule.code}: {type(error).__name__}: {error}")
            continue
        if diagnosis is not None:
            found.append(replace(diagnosis, page=f"docs/rules/{rule.code}.md"))
    return found


def _withdraw(found: list[Diagnosis]) -> list[Diagnosis]:
    codes = {diagnosis.code for diagnosis in found}
    causes = codes - {"NS000"} - {"NS801", "NS802"}
    if causes:
        codes.discard("NS000")
    firm = {diagnosis.code for diagnosis in found if diagnosis.confidence != "possible"}
    return [
        diagnosis
        for diagnosis in found
        if diagnosis.code in codes and not firm.intersection(YIELDS.get(diagnosis.code, ()))
    ]


def _order(diagnosis: Diagnosis) -> tuple[bool, int, str]:
    return diagnosis.code in SYMPTOMS, RANK[diagnosis.confidence], diagnosis.code


def _attach(diagnosis: Diagnosis, ordered: Sequence[Diagnosis]) -> Diagnosis:
    """Name the standing facts beside a cause, and the symptoms beside the best one."""
    beside = set(COMPANIONS.get(diagnosis.code, ()))
    if diagnosis.code == ordered[0].code:
        beside.update(SYMPTOMS)
    beside.discard(diagnosis.code)
    codes = (other.code for other in ordered if other.code in beside)
    return replace(diagnosis, accompanied_by=tuple(codes))
