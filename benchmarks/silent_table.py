"""The page of the silent faults: how many are named, with their line, and what twins were told."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scoreboard_lines import share
from scoreboard_said import said_in
from scoring import Said, certain_and_wrong, is_alarm, score
from silent_faults import Spelling

WITHIN = 20
"""Updates within which a fault is to be named."""
MOST_LINES = 3
"""Whoever names more lines of a script than this has not said which one it is."""
_ABOUT = f"""# Silent faults

Faults that are finite (`benchmarks/silent/`): no NaN is logged or written, and the run is wrong.
Each is spelled by hand, by torch, by accelerate, transformers or TRL, and each spelling has a
healthy twin: the same script without the fault. They were written without a look at nanstop's
rules and frozen before the first run. Named: an accepted finding before the first update or within
{WITHIN}. Line: of those whose script has a line that is to blame, it is among the first
{MOST_LINES} that are named. The first run stays as it was; a later one stands beside it.

Again: `make silent`. What was said of each: `benchmarks/results/silent.json`.
"""
KINDS = ("hand", "torch", "accelerate", "hf", "trl")


@dataclass(frozen=True)
class Seen:
    """What was said of one spelling. ``line``: None where no line is asked for."""

    named: bool
    strict: bool
    line: bool | None
    alarm: bool
    wrong: tuple[str, ...]
    case: Said
    twin: Said


def page(spellings: Sequence[Spelling], kept: Mapping[str, Any]) -> tuple[str, str]:
    """Return the page of all runs that are kept, and the figures of the last one."""
    parts, figures, last = [_ABOUT], "", {}
    for name, records in kept.items():
        last = {one: _seen(one, records) for one in spellings if _is_in(one, records)}
        figures = "\n".join(_figures(last))
        parts.append(f"## {name.capitalize()}\n\n{figures}")
    parts.append("\n".join(_faults(last)))
    return "\n\n".join(part.strip() for part in parts) + "\n", figures


def _is_in(one: Spelling, records: Mapping[str, Any]) -> bool:
    return f"{one.fault}.{one.name}.case" in records


def _seen(one: Spelling, records: Mapping[str, Any]) -> Seen:
    case, twin = (
        said_in(records[f"{one.fault}.{one.name}.{which}"]) for which in ("case", "healthy")
    )
    row = score(one.truth, case, twin, twin.final_loss)
    named = bool(row["detected"]) and (case.step is None or case.step <= WITHIN)
    return Seen(
        named=named,
        strict=bool(row["strict"]),
        line=(named and _is_line(one, case)) if one.lines else None,
        alarm=is_alarm(twin) or bool(twin.failed),
        wrong=certain_and_wrong(one.truth, case, twin),
        case=case,
        twin=twin,
    )


def _is_line(one: Spelling, case: Said) -> bool:
    own = [line for line in case.lines if line.startswith(f"{one.script.name}:")]
    return any(int(re.split(":", line)[1]) in one.lines for line in own[:MOST_LINES])


def _figures(seen: Mapping[Spelling, Seen]) -> list[str]:
    """Return the shares, of all spellings and of each kind of them."""
    lines = [
        "| spelling | named | first of all | line | alarms on twins |",
        "|---|---|---|---|---|",
    ]
    for kind in ("all", *KINDS):
        rows = [row for one, row in seen.items() if kind in ("all", one.name)]
        if rows:
            lines.append(f"| {kind} | {' | '.join(_cells(rows))} |")
    whole = [
        all(row.named for other, row in seen.items() if other.fault == fault)
        for fault in dict.fromkeys(one.fault for one in seen)
    ]
    wrong = [
        f"{one.fault} ({one.name}): {' '.join(row.wrong)}" for one, row in seen.items() if row.wrong
    ]
    return [
        *lines,
        "",
        f"Faults that are named in every spelling: {share(sum(whole), len(whole))}.",
        "",
        f"Said at `certain` and not accepted by the truth: {'; '.join(wrong) or 'none'}.",
    ]


def _cells(rows: Sequence[Seen]) -> Iterable[str]:
    asked = [row.line for row in rows if row.line is not None]
    yield share(sum(row.named for row in rows), len(rows))
    yield share(sum(row.strict for row in rows), len(rows))
    yield share(sum(asked), len(asked)) if asked else "-"
    yield f"{sum(row.alarm for row in rows)} of {len(rows)}"


def _faults(seen: Mapping[Spelling, Seen]) -> list[str]:
    """Return the table of all spellings, as they were in the last run."""
    lines = [
        "## Fault by fault",
        "",
        "| fault | spelling | truth | said | line | said of the twin |",
        "|---|---|---|---|---|---|",
    ]
    for one, row in seen.items():
        line = {None: "-", True: "right", False: "missed"}[row.line]
        said = f"**{_said(row.case)}**" if row.named else _said(row.case)
        truth = ", ".join(one.truth.codes)
        cells = (one.fault, one.name, truth, said, line, _said(row.twin))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _said(said: Said) -> str:
    if said.failed:
        return said.failed.splitlines()[-1][:60].replace("|", "\\|")
    return ", ".join(f"{code} {sure}" for code, sure in said.answers) or "nothing"
