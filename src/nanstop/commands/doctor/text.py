"""The audit of a stack's guards as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import get_args

from nanstop.commands.doctor.result import INJECTED, Act, Doctor, GuardRow, Injected, InjectedRow
from nanstop.language.translate import translated
from nanstop.report.text.wrapping import columns, padded

NAMES: Mapping[Injected, str] = MappingProxyType(
    {
        "nan_loss": "NaN loss",
        "inf_loss": "+Inf loss",
        "nan_gradient": "NaN in one gradient",
        "inf_gradient": "+Inf in one gradient",
        "norm_overflow": "overflow of the norm, gradients finite",
    }
)

_REACHES = "reaches the weights"
_ORDER: tuple[Act, ...] = get_args(Act)


def render(found: Doctor) -> str:
    """Return what became of each failure, what guards did, and how many failures got through, in
    the language that is asked for.
    """
    head = [f"guards of {found.host}, observed in {len(found.trials)} short trainings", ""]
    head += ["what became of a failure in one step"]
    middle = ["", "what each guard did about it"]
    tail = ["", *(f"note: {note}" for note in found.notes), reaching(found)]
    became = [(NAMES[row.injected], _became(row)) for row in found.failures]
    rows = _rows(became, NAMES.values(), "  ")
    lines = [*map(translated, head), *(row.replace(_REACHES, _REACHES.upper(), 1) for row in rows)]
    lines += map(translated, middle)
    for row in found.guards:
        is_host = row.guard.kind == "host"
        named = f"{row.guard.name} itself, without them" if is_host else row.guard.name
        lines.append(f"  {translated(named)}")
        lines += _rows(_acts(row), _ORDER, "    ")
    return "\n".join([*lines, *map(translated, tail)])


def _rows(rows: Iterable[tuple[str, str]], names: Iterable[str], indent: str) -> Iterator[str]:
    """Yield rows of a name and a text, below each other whichever of the ``names`` they have."""
    width = max(columns(translated(name)) for name in names)
    for name, text in rows:
        yield f"{indent}{padded(translated(name), width)}  {translated(text)}"


def reaching(found: Doctor) -> str:
    """Return how many of the failures that were injected reach the weights, in words."""
    tried = sum(row.tried for row in found.failures)
    return f"{found.num_reaching or 'none'} of {tried} injected failures reach the weights"


def _became(row: InjectedRow) -> str:
    if not row.tried:
        return row.outcome
    by = f" (by {', '.join(row.stopped_by)})" if row.stopped_by else ""
    return f"{_REACHES if row.reaches_weights else 'ok'}: {row.outcome}{by}"


def _acts(row: GuardRow) -> Iterator[tuple[str, str]]:
    """Yield each act of a guard with the failures in which it was seen."""
    for act in _ORDER:
        cases: list[Injected] = [
            case for case, done in zip(INJECTED, row.acts, strict=True) if done == act
        ]
        if cases:
            all_of_them = len(cases) == len(INJECTED)
            yield act, "every one" if all_of_them else ", ".join(map(_short, cases))


def _short(case: Injected) -> str:
    return NAMES[case].partition(",")[0]
