"""Evidence -> diagnoses, best first. Pure: no torch, no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from nanstop.diagnose.catalogue import CATALOGUE
from nanstop.diagnose.evidence.rule import Rule
from nanstop.frozen import frozen
from nanstop.records import Change, Diagnosis, Evidence, Report
from nanstop.records.vocabulary import RANK
from nanstop.wording import number


@frozen
class Examination:
    """``failures``: rules that raised, with the reason."""

    diagnoses: tuple[Diagnosis, ...]
    failures: tuple[str, ...]
    open: tuple[tuple[str, Change], ...] = ()
    """Experiments that would decide, each with the code of the finding that names it."""


def diagnose(evidence: Evidence, when: str) -> tuple[Diagnosis, ...]:
    """Return what the rules of kind ``when`` (see ``Rule``) conclude, best first.

    An incident without any other cause has NS000. A rule that raises is left out (see ``examine``).
    """
    return examine(evidence, when).diagnoses


def examine(evidence: Evidence, when: str, catalogue: Sequence[Rule] = CATALOGUE) -> Examination:
    """Return ``diagnose``'s answer together with the rules that raised."""
    failures: list[str] = []
    rules = {rule.code: rule for rule in catalogue}
    asked_now = (rule for rule in catalogue if when in rule.when)
    if when == "incident":
        asked_now = (replace(rule, check=rule.at_failure or rule.check) for rule in asked_now)
    found = _run(asked_now, evidence, failures)
    asked = _asked(found, rules, evidence)
    found = [one for diagnosis in found if (one := _judged(diagnosis, asked, evidence))]
    kept = _withdraw(found, rules)
    wanted = {code for diagnosis in kept for code in rules[diagnosis.code].beside}
    wanted -= {diagnosis.code for diagnosis in kept}
    beside = _run((rule for rule in catalogue if rule.code in wanted), evidence, failures)
    ordered = tuple(one for part in (kept, beside) for one in sorted(part, key=_order(rules)))
    made = {(one.code, one.change) for one in evidence.experiments}
    changes = ((code, change) for code, change in asked.items() if change is not None)
    return Examination(
        tuple(_attach(one, ordered, rules) for one in ordered),
        tuple(failures),
        tuple(one for one in changes if one not in made),
    )


def diagnose_anew(report: Report) -> Report:
    """Return the report with today's diagnoses; with its own where records hold too little."""
    incident = report.incident
    if report.trains_nothing:
        return report
    evidence = Evidence(
        facts=incident.facts,
        incident=incident,
        replay=report.replay,
        localization=report.localization,
        series=incident.history,
        experiments=report.experiments,
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
            page = f"docs/rules/{rule.code}.md"
            usual = diagnosis.usual_cure or ("" if diagnosis.trains_nothing else rule.usual_cure)
            made = replace(diagnosis, page=page, usual_cure=usual)
            found.append(_placed(made, evidence))
    return found


def _placed(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Return the finding of an exception with the line of the script that it went through, where
    neither the finding nor the operation that failed has one.
    """
    located, failed = evidence.localization, evidence.incident
    line = next((s.raised_at for s in failed.signals if s.raised_at), None) if failed else None
    if located is None or line is None or diagnosis.source is not None:
        return diagnosis
    if located.first_bad is not None and located.first_bad.source is not None:
        return diagnosis
    if located.first_bad is None and not diagnosis.where:
        return diagnosis.at(line)
    return replace(diagnosis, lines=(*diagnosis.lines, f"raised at {line.short}: `{line.text}`"))


_CONFIRMED = {
    "raise_zeros": "with {value} in place of each 0 of that operand the same operation is finite",
    "fill_rows": "with {value} in one place of each row of zeros the same operation is finite",
    "bound": "with its argument held within {value} the same operation is finite",
    "unmask": "with one entry of each such row in sight the same operation is finite",
    "supervise": "with one label that is not ignored the same operation is finite",
    "exponentiate": "with the exponentials in their place, which sum to {value}, the same "
    "operation is finite",
    "vary": "with a ramp up to {value} added to that operand the same operation is finite",
}


def _asked(
    found: Iterable[Diagnosis], rules: Mapping[str, Rule], evidence: Evidence
) -> dict[str, Change | None]:
    """Return by code the change that decides a finding, None where there is none to be made."""
    if evidence.incident is None:
        return {}
    unsure = ((one.code, rules[one.code].confirm) for one in found if not one.confirmed)
    return {code: confirm(evidence) for code, confirm in unsure if confirm is not None}


def _judged(
    diagnosis: Diagnosis, asked: Mapping[str, Change | None], evidence: Evidence
) -> Diagnosis | None:
    """Return a finding as its experiment leaves it: confirmed, only likely, or not at all."""
    if diagnosis.code not in asked:
        return diagnosis
    change = asked[diagnosis.code]
    outcome = next(
        (e.outcome for e in evidence.experiments if (e.code, e.change) == (diagnosis.code, change)),
        "unknown",
    )
    if outcome == "nonfinite":
        return None
    if change is not None and outcome == "finite":
        said = _CONFIRMED[change.kind].format(value=number(change.value))
        return replace(diagnosis, confirmed=said)
    weaker = max(diagnosis.confidence, "likely", key=RANK.__getitem__)
    return replace(diagnosis, confidence=weaker)


def _withdraw(found: list[Diagnosis], rules: Mapping[str, Rule]) -> list[Diagnosis]:
    """Leave out what is explained by now, what a firm, more specific diagnosis says too, and what
    would have made a failure that comes by chance.
    """
    roles = {rules[diagnosis.code].role for diagnosis in found}
    explained = not roles.isdisjoint(("cause", "chance", "symptom"))
    by_chance = any(
        rules[one.code].role == "chance" and one.confidence == "certain" for one in found
    )
    firm = {diagnosis.code for diagnosis in found if diagnosis.confidence != "possible"}
    return [
        diagnosis
        for diagnosis in found
        if not (explained and rules[diagnosis.code].role == "unexplained")
        and not (by_chance and rules[diagnosis.code].role == "cause")
        and firm.isdisjoint(rules[diagnosis.code].yields_to)
    ]


def _order(rules: Mapping[str, Rule]) -> Callable[[Diagnosis], tuple[bool, bool, int, str]]:
    """Return the key to sort by: causes before how they show, what is confirmed of the updates that
    led to a failure before what it is by itself, the more certain first.
    """
    return lambda one: (
        _shows(rules[one.code]),
        not (one.of_updates and one.confirmed),
        RANK[one.confidence],
        one.code,
    )


def _shows(rule: Rule) -> bool:
    return rule.role in ("symptom", "log")


def _attach(
    diagnosis: Diagnosis, ordered: Sequence[Diagnosis], rules: Mapping[str, Rule]
) -> Diagnosis:
    """Name the standing facts beside a cause, and the symptoms beside the best one."""
    best = diagnosis.code == ordered[0].code
    codes = (
        other.code
        for other in ordered
        if other.code != diagnosis.code
        and (other.code in rules[diagnosis.code].beside or (best and _shows(rules[other.code])))
    )
    return replace(diagnosis, accompanied_by=tuple(codes))
