"""The audit of a stack's guards as text."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import get_args

from nanstop.commands.doctor.result import INJECTED, Act, Doctor, GuardRow, Injected, InjectedRow

NAMES: Mapping[Injected, str] = MappingProxyType(
    {
        "nan_loss": "NaN loss",
        "inf_loss": "+Inf loss",
        "nan_gradient": "NaN in one gradient",
        "inf_gradient": "+Inf in one gradient",
        "norm_overflow": "overflow of the norm, gradients finite",
    }
)

_ORDER: tuple[Act, ...] = get_args(Act)
_WIDTH = max(map(len, NAMES.values()))
_ACT_WIDTH = max(map(len, _ORDER))


def render(found: Doctor) -> str:
    """Return what became of each failure, what guards did, and how many failures got through."""
    lines = [f"guards of {found.host}, observed in {len(found.trials)} short trainings", ""]
    lines += ["what became of a failure in one step"]
    lines += [f"  {NAMES[row.injected]:{_WIDTH}}  {_became(row)}" for row in found.failures]
    lines += ["", "what each guard did about it"]
    for row in found.guards:
        lines += _guard(row)
    lines += ["", *(f"note: {note}" for note in found.notes), reaching(found)]
    return "\n".join(lines)


def reaching(found: Doctor) -> str:
    """Return how many of the failures that were injected reach the weights, in words."""
    tried = sum(row.tried for row in found.failures)
    return f"{found.num_reaching or 'none'} of {tried} injected failures reach the weights"


def _became(row: InjectedRow) -> str:
    if not row.tried:
        return row.outcome
    by = f" (by {', '.join(row.stopped_by)})" if row.stopped_by else ""
    return f"{'REACHES THE WEIGHTS' if row.reaches_weights else 'ok'}: {row.outcome}{by}"


def _guard(row: GuardRow) -> list[str]:
    own = " itself, without them" if row.guard.kind == "host" else ""
    lines = [f"  {row.guard.name}{own}"]
    for act in _ORDER:
        cases: list[Injected] = [
            case for case, done in zip(INJECTED, row.acts, strict=True) if done == act
        ]
        if cases:
            shown = "every one" if len(cases) == len(INJECTED) else ", ".join(map(_short, cases))
            lines.append(f"    {act:{_ACT_WIDTH}}  {shown}")
    return lines


def _short(case: Injected) -> str:
    return NAMES[case].partition(",")[0]
