"""What a tool said of a case, held against the truth. Pure: no processes, no files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from truth import Truth, matches

PARITY = 0.02
"""A cured run's last loss may differ from its healthy twin's by this share."""

COLUMNS = (
    "detected",
    "step",
    "micro",
    "phase",
    "op",
    "module",
    "cause",
    "proven",
    "parity",
    "quiet",
)


@dataclass(frozen=True)
class Said:
    """What a tool said of one run. None: it says nothing of that kind.

    ``codes``: its findings, the main one first. ``alarms``: how many things it reported as failures or warnings.
    """

    alarms: int = 0
    codes: tuple[str, ...] = ()
    step: int | None = None
    micro: int | None = None
    phase: str | None = None
    op: str | None = None
    module: str | None = None
    proven: bool | None = None
    final_loss: float = math.nan
    seconds: float = 0.0
    failed: str = ""
    """Why the tool could not run the case at all; such a case is "n/a" for it."""


def score(truth: Truth, case: Said, twin: Said, healthy_loss: float) -> dict[str, bool | None]:
    """Return each column of one case: right, wrong, or None where it does not apply.

    ``healthy_loss``: the twin's last loss without any tool.
    """
    if case.failed:
        return dict.fromkeys(COLUMNS)
    detects = truth.kind in ("loud", "silent")
    detected = bool(case.alarms) if truth.kind != "silent" else _names_cause(truth, case)
    found: dict[str, bool | None] = {
        "detected": detected if detects else None,
        "cause": _cause(truth, case),
        "quiet": _quiet(truth, case, twin),
    }
    found |= {
        name: detected and right if detects and known else None
        for name, right, known in (
            ("step", case.step == truth.step, truth.step is not None),
            ("micro", case.micro == truth.micro, truth.micro is not None),
            ("phase", _same_phase(truth, case), truth.phase is not None),
            ("op", case.op is not None and matches(case.op, truth.op), bool(truth.op)),
            (
                "module",
                case.module is not None and matches(case.module, truth.module),
                bool(truth.module),
            ),
        )
    }
    if truth.in_run:
        gap = abs(case.final_loss - healthy_loss) / max(abs(healthy_loss), 1e-12)
        found |= {"proven": bool(case.proven), "parity": gap <= PARITY}
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


def _same_phase(truth: Truth, case: Said) -> bool:
    """A recomputed forward is part of the backward call, and a loss is computed in forward."""
    same = {"recompute": "backward", "loss": "forward"}
    said = same.get(case.phase or "", case.phase)
    return said == same.get(truth.phase or "", truth.phase)


def _names_cause(truth: Truth, case: Said) -> bool:
    return any(code in truth.codes for code in case.codes)


def _cause(truth: Truth, case: Said) -> bool | None:
    if truth.kind == "scary":
        return None
    return bool(case.codes) and case.codes[0] in truth.codes


def _quiet(truth: Truth, case: Said, twin: Said) -> bool:
    """No alarm on the twin, and none on a case that only looks bad."""
    if twin.failed:
        return True
    if truth.kind == "scary" and any(code not in truth.codes for code in case.codes):
        return False
    if truth.kind == "scary" and case.alarms and not case.codes:
        return False
    return twin.alarms == 0
