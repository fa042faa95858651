"""What a tool said of a case, held against the truth. Pure: no processes, no files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from truth import Truth, matches

PARITY = 0.02
"""A cured run's last loss may differ from its healthy twin's by this share."""

ALL_IS_WELL = {"NS802"}
"""Findings that say of something that looks bad that it is by design: no alarm on a healthy run."""

COLUMNS = (
    "detected",
    "step",
    "micro",
    "phase",
    "op",
    "module",
    "cause",
    "strict",
    "proven",
    "parity",
    "quiet",
)
Row = dict[str, bool | None]
"""Each column of one case: right, wrong, or None where it does not apply."""

Answer = tuple[str, str]
"""A code and the confidence with which it was given."""


@dataclass(frozen=True)
class Said:
    """What a tool said of one run. None: it says nothing of that kind.

    ``alarms``: how many things it reported as failures or warnings. ``beyond_twin``: those that the
    healthy twin has, too, are not among them. ``incidents``: those of them that are failures.
    ``answers``: its findings, the main one first. ``ops``, ``modules``: what it blames first, in
    each of the forms that may be compared with an operator of ATen or the name of a module; empty
    where it names none. ``lines``: "FILE.py:LINE" of what it said. ``cure``: "safe",
    "allowed" (it changes training) or "isolated" (what fails was left out), where it ended in one
    of these.
    """

    alarms: int = 0
    beyond_twin: bool = False
    incidents: int = 0
    answers: tuple[Answer, ...] = ()
    ruled_out: tuple[str, ...] = ()
    step: int | None = None
    micro: int | None = None
    phase: str | None = None
    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    proven: bool | None = None
    cure: str = ""
    final_loss: float = math.nan
    seconds: float = 0.0
    failed: str = ""
    """Why the tool could not run the case at all."""

    @property
    def codes(self) -> tuple[str, ...]:
        return tuple(code for code, _ in self.answers)


def score(
    truth: Truth, case: Said, twin: Said, healthy_loss: float, *, names_causes: bool = True
) -> Row:
    """Return each column of one case.

    ``healthy_loss``: the twin's last loss without any tool. ``names_causes``: whether the tool has
    findings; of one that has none, an alarm on a silent case counts if it has none on the twin, and
    a run that it failed on is no miss but "n/a". No answer is a miss wherever the truth has one.
    """
    if case.failed and not names_causes:
        return dict.fromkeys(COLUMNS)
    if case.failed:
        case = replace(Said(), final_loss=case.final_loss)
    detects = truth.kind in ("loud", "silent")
    detected = _detected(truth, case, twin, names_causes=names_causes)
    found: Row = {
        "detected": detected if detects else None,
        "cause": _cause(truth, case) if names_causes else None,
        "strict": _strict(truth, case) if names_causes else None,
        "quiet": _quiet(truth, case, twin, names_causes=names_causes),
    }
    found |= {
        name: (detected and right) if detects and known else None
        for name, right, known in (
            ("step", case.step == truth.step, truth.step is not None),
            ("micro", case.micro == truth.micro, truth.micro is not None),
            ("phase", _same_phase(truth, case), truth.phase is not None),
            ("op", any(matches(op, truth.op) for op in case.ops), bool(truth.op)),
            ("module", any(matches(m, truth.module) for m in case.modules), bool(truth.module)),
        )
    }
    if truth.in_run and names_causes:
        gap = abs(case.final_loss - healthy_loss) / max(abs(healthy_loss), 1e-12)
        cured = bool(case.proven) and (case.cure != "isolated" or truth.only_isolated)
        found |= {"proven": cured, "parity": gap <= PARITY}
    return {name: found.get(name) for name in COLUMNS}


def rates(rows: Iterable[Mapping[str, bool | None]]) -> dict[str, tuple[int, int]]:
    """Return of each column how many rows are right, of how many to which it applies."""
    kept = list(rows)
    return {
        name: (
            sum(row[name] is True for row in kept),
            sum(row[name] is not None for row in kept),
        )
        for name in COLUMNS
    }


def certain_and_wrong(truth: Truth, case: Said, twin: Said) -> tuple[str, ...]:
    """Return the codes that were said at ``certain`` and are not so, of the case and of its twin.

    What is neither the cause nor true beside it (``also``) is wrong.
    """
    true = {*truth.codes, *truth.also}
    wrong = [code for code, sure in case.answers if sure == "certain" and code not in true]
    alarms = [c for c, sure in twin.answers if sure == "certain" and c not in ALL_IS_WELL]
    return tuple(dict.fromkeys((*wrong, *alarms)))


def _detected(truth: Truth, case: Said, twin: Said, *, names_causes: bool) -> bool:
    """A loud failure is detected by an incident, or foretold by its cause;
    a silent one by its cause.
    """
    if not names_causes:
        told_apart = case.beyond_twin or not twin.alarms
        return bool(case.alarms) and (truth.kind != "silent" or told_apart)
    named = any(code in truth.codes for code in case.codes)
    return named or (truth.kind == "loud" and bool(case.incidents))


def _same_phase(truth: Truth, case: Said) -> bool:
    """A recomputed forward is part of the backward call, and a loss is computed in forward."""
    same = {"recompute": "backward", "loss": "forward"}
    said = same.get(case.phase or "", case.phase)
    return said == same.get(truth.phase or "", truth.phase)


def _cause(truth: Truth, case: Said) -> bool | None:
    if truth.kind == "scary":
        return None
    if not case.answers:
        return False
    code, confidence = case.answers[0]
    unsure = confidence != "certain" and bool(case.ruled_out)
    return code in truth.codes or (truth.kind == "open" and unsure)


def _strict(truth: Truth, case: Said) -> bool | None:
    """Return whether the first answer is the very finding that the case was made for."""
    if truth.kind not in ("loud", "silent"):
        return None
    return case.codes[:1] == truth.codes[:1]


def _quiet(truth: Truth, case: Said, twin: Said, *, names_causes: bool) -> bool | None:
    """No alarm on the twin, and none on a case that only looks bad."""
    if truth.kind == "scary":
        accepted = names_causes and all(code in truth.codes for code in case.codes)
        if case.alarms and not (accepted and not case.incidents):
            return False
    if twin.failed:
        return None
    return not is_alarm(twin)


def is_alarm(healthy: Said) -> bool:
    """Return whether a tool has called a healthy run a failure, or warned of one."""
    reassured = bool(healthy.codes) and {*healthy.codes} <= ALL_IS_WELL
    return bool(healthy.incidents) or (bool(healthy.alarms) and not reassured)
