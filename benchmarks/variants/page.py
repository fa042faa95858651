"""The page of variants, and the lines that must hold."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from scoreboard_lines import Line, share
from truth import Truth

from variants.answer import answer_of
from variants.catalogue import FAMILIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LEAST_VARIANTS, LEAST_SHARE = 8.0, 0.97
REASONS = Path(__file__).with_name("reasons.toml")
_ABOUT = (
    "What nanstop says of a failure must not depend on how the script is spelled. Each case of "
    "`benchmarks/cases/` is rewritten in ways that mean the same. A variant counts if, run without "
    "nanstop, it fails at the same step in the same way and prints the same numbers; then code, "
    "operation, module, source line, step, micro-batch and row must be those that were said of the "
    "unchanged case. The row follows where a rewrite reverses the rows of a batch; a module keeps "
    "its name where it is renamed or wrapped; the line is followed through the rewrite; operations "
    "that are spellings of one thing are in one row of a table "
    "(`benchmarks/variants/operations.py`)."
)
_AGAIN = (
    "Again: `make metamorphic`. What was said of each variant: "
    "`benchmarks/results/metamorphic.json`."
)


@dataclass(frozen=True)
class _One:
    """A variant that counts."""

    case: str
    rewrite: str
    kept: Mapping[str, Any]


def write_page(truths: Sequence[Truth], kept: Mapping[str, Any], path: Path) -> tuple[Line, ...]:
    """Write the page of what is kept and return its lines."""
    known = {truth.name: truth for truth in truths}
    cases = {name: one for name, one in kept["cases"].items() if name in known}
    same = [
        _One(case, rewrite, found)
        for case, one in cases.items()
        for rewrite, found in one["variants"].items()
        if "changed" in found
    ]
    lines = _lines(cases, same, known)
    parts = [
        "# The answer does not depend on how the script is spelled",
        "",
        _ABOUT,
        "",
        _AGAIN,
        "",
        "```",
        *map(str, lines),
        "```",
        "",
        *_families(cases, same),
        "",
        *_certain_table(same, known),
        "",
        *_changed_table(same),
    ]
    path.write_text("\n".join(parts) + "\n")
    return lines


def _lines(
    cases: Mapping[str, Any], same: Sequence[_One], known: Mapping[str, Truth]
) -> tuple[Line, ...]:
    invariant = sum(not one.kept["changed"] for one in same)
    mean = len(same) / len(cases) if cases else 0.0
    wrong = sum(not right for _, _, right in _certain(same, known))
    total = sum(1 for _ in _certain(same, known))
    left_out = sum(len(one["variants"]) for one in cases.values()) - len(same)
    return (
        Line(
            f"variants a case: {mean:.1f}, {len(same)} of {len(cases)} cases "
            f"({left_out} more did not mean the same and were left out)",
            f">= {LEAST_VARIANTS:.0f}",
            mean >= LEAST_VARIANTS,
        ),
        Line(
            f"variants with the same answer: {share(invariant, len(same))}",
            f">= {100 * LEAST_SHARE:.0f} %",
            invariant >= LEAST_SHARE * len(same),
        ),
        Line(
            f"main answers at `certain` that the truth does not have: {wrong} of {total}",
            "0",
            not wrong,
        ),
    )


def _certain(same: Sequence[_One], known: Mapping[str, Truth]) -> Iterator[tuple[_One, str, bool]]:
    """Return each main answer that was given at ``certain``, and whether the truth has it."""
    for one in same:
        answers = answer_of(one.kept["answer"]).answers[:1]
        for code, sure in answers:
            if sure == "certain":
                yield one, code, code in known[one.case].codes


def _beside(same: Sequence[_One], known: Mapping[str, Truth]) -> dict[str, list[str]]:
    """Return the statements at ``certain`` beside the main one that the truth does not have."""
    found: dict[str, list[str]] = {}
    for one in same:
        for code, sure in answer_of(one.kept["answer"]).answers[1:]:
            if sure == "certain" and code not in known[one.case].codes:
                found.setdefault(f"{one.case}: {code}", []).append(one.rewrite)
    return found


def _families(cases: Mapping[str, Any], same: Sequence[_One]) -> list[str]:
    rows = ["| rewrite | variants | same answer | not the same training |", "|---|---|---|---|"]
    for family, rewrites in FAMILIES.items():
        rows.append(f"| **{family}** | | | |")
        for name in (rewrite.name for rewrite in rewrites):
            those = [one for one in same if one.rewrite == name]
            right = sum(not one.kept["changed"] for one in those)
            made = sum(name in one["variants"] for one in cases.values())
            shown = share(right, len(those))
            rows.append(f"| {name} | {len(those)} | {shown} | {made - len(those)} |")
    return ["## Rewrites", "", *rows]


def _certain_table(same: Sequence[_One], known: Mapping[str, Truth]) -> list[str]:
    found = list(_certain(same, known))
    beside = _beside(same, known)
    right = sum(one[2] for one in found)
    rows = [
        "## Statements at `certain`",
        "",
        f"Main answers: {right} true, {len(found) - right} false, by `truth.toml`.",
        *(f"- {one.case}, {one.rewrite}: {code}" for one, code, is_right in found if not is_right),
        "",
        "Beside the main answer, at `certain`, and not in `truth.toml`, which lists causes only:",
        "",
        *(f"- {what} ({len(names)} variants)" for what, names in sorted(beside.items())),
    ]
    return rows if beside else [*rows, "none"]


def _changed_table(same: Sequence[_One]) -> list[str]:
    reasons = tomllib.loads(REASONS.read_text()) if REASONS.is_file() else {}
    rows = ["| case | rewrite | what changed | reason |", "|---|---|---|---|"]
    for one in same:
        if one.kept["changed"]:
            text = "; ".join(one.kept["changed"]).replace("|", "/")
            rows.append(f"| {one.case} | {one.rewrite} | {text} | {_reason(one, reasons)} |")
    return ["## Variants that changed the answer", "", *rows]


def _reason(one: _One, reasons: Mapping[str, str]) -> str:
    name = f"{one.case}.{one.rewrite}"
    found = (reason for pattern, reason in reasons.items() if fnmatchcase(name, pattern))
    return next(found, "not looked into")
