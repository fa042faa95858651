"""The scoreboard as a table: from what is kept of each run to Markdown, JSON and the lines that are printed last."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scoring import COLUMNS, Said, rates, score
from truth import Truth

Rows = Mapping[str, dict[str, bool | None]]
_TITLES = {
    "detected": "detected",
    "step": "right step",
    "micro": "right micro-batch",
    "phase": "right phase",
    "op": "exact op",
    "module": "exact module",
    "cause": "right cause (top 1)",
    "proven": "cure proven",
    "parity": "cured run within 2 %",
    "quiet": "no false alarm",
}

_ABOUT = (
    "Real failures of fine-tuning as runnable cases (`benchmarks/cases/`), each with its healthy twin, run under "
    "nanstop and under other tools. Each column counts the cases to which it applies; a tool that names no operation "
    "is wrong where one is to be named, and a case that a tool cannot run is left out of its row."
)
_AGAIN = (
    "Again: `make scoreboard` (nanstop), `make scoreboard-peers` (the others). "
    "Commands and raw outputs: `benchmarks/results/scoreboard/`."
)
_CAUSE_AND_CURE = ("cause", "proven", "parity")
"""Columns of what only nanstop attempts."""


def write_table(truths: Sequence[Truth], results: Path, page: Path) -> str:
    """Score all that is kept under ``results``, write ``page`` and a JSON file beside the results; return the last lines."""
    healthy = {truth.name: kept(results, "plain", truth.name, "healthy") for truth in truths}
    tools = sorted(
        (folder.name for folder in results.iterdir() if folder.is_dir() and folder.name != "plain"),
        key=lambda name: (name != "nanstop", name),
    )
    boards = {tool: _rows(truths, results, tool, healthy) for tool in tools}
    page.write_text(_page(truths, boards, _versions(results)))
    results.with_suffix(".json").write_text(json.dumps(boards, indent=1) + "\n")
    return _last_lines(truths, boards.get("nanstop", {}))


def kept(results: Path, tool: str, case: str, script: str) -> Said | None:
    """Return what a tool said of a run, or None where it was not run."""
    path = results / tool / f"{case}.{script}.json"
    if not path.is_file():
        return None
    said = json.loads(path.read_text())["said"]
    return Said(**(said | {"codes": tuple(said["codes"])}))


def _rows(
    truths: Sequence[Truth], results: Path, tool: str, healthy: Mapping[str, Said | None]
) -> Rows:
    rows = {}
    for truth in truths:
        case, twin = (kept(results, tool, truth.name, one) for one in ("case", "healthy"))
        plain = healthy[truth.name]
        if case is not None and twin is not None:
            loss = plain.final_loss if plain is not None else math.nan
            rows[truth.name] = score(truth, case, twin, loss)
    return rows


def _page(truths: Sequence[Truth], boards: Mapping[str, Rows], versions: str) -> str:
    head = "| tool | cases | " + " | ".join(_TITLES.values()) + " |"
    lines = [
        "# Scoreboard",
        "",
        _ABOUT,
        "",
        f"{versions}. {_AGAIN}",
        "",
        head,
        "|" + "---|" * (len(_TITLES) + 2),
    ]
    for tool, rows in boards.items():
        ran = [row for row in rows.values() if any(value is not None for value in row.values())]
        cells = [
            "-" if tool != "nanstop" and name in _CAUSE_AND_CURE else _share(*pair)
            for name, pair in rates(ran).items()
        ]
        lines.append(f"| {tool.replace('_', ' ')} | {len(ran)} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## nanstop, case by case",
        "",
        "| case | kind | cause | wrong |",
        "|---|---|---|---|",
    ]
    for truth in truths:
        row = boards.get("nanstop", {}).get(truth.name)
        if row is not None:
            wrong = ", ".join(_TITLES[name] for name in COLUMNS if row[name] is False) or "-"
            lines.append(f"| {truth.name} | {truth.kind} | {', '.join(truth.codes)} | {wrong} |")
    return "\n".join(lines) + "\n"


def _last_lines(truths: Sequence[Truth], rows: Rows) -> str:
    by_kind: dict[str, list[Any]] = {"loud": [], "silent": [], "scary": [], "open": []}
    for truth in truths:
        if truth.name in rows:
            by_kind[truth.kind].append(rows[truth.name])
    every = rates(rows.values())
    loud, silent, undecided = (
        _share(*rates(by_kind[kind])[column])
        for kind, column in (("loud", "detected"), ("silent", "detected"), ("open", "cause"))
    )
    shares = [
        f"{_TITLES[name]}: {_share(*every[name])}"
        for name in COLUMNS
        if name not in ("detected", "quiet")
    ]
    counts = ", ".join(f"{len(found)} {kind}" for kind, found in by_kind.items())
    lines = [
        f"cases {len(rows)}: {counts}",
        f"detected: loud {loud}, silent {silent}",
        *shares,
        f"false alarms: {every['quiet'][1] - every['quiet'][0]} of {every['quiet'][1]}",
        f"not established where the evidence does not decide: {undecided}",
    ]
    return "\n".join(lines)


def _share(right: int, of: int) -> str:
    return f"{right}/{of} ({100 * right / of:.0f} %)" if of else "n/a"


def _versions(results: Path) -> str:
    records = sorted(results.glob("nanstop/*.json"))
    found = json.loads(records[-1].read_text())["versions"] if records else {}
    return ", ".join(f"{name} {number}" for name, number in found.items())
