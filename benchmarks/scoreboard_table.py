"""The scoreboard as a table: from what is kept of each run to Markdown, JSON and the lines that
are printed last.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from scoreboard_lines import Board, Kept, lines_of, said_of, share
from scoring import COLUMNS, Row, Said, rates, score
from truth import Truth

_TITLES = {
    "detected": "detected",
    "step": "right step",
    "micro": "right micro-batch",
    "phase": "right phase",
    "op": "exact op",
    "module": "exact module",
    "cause": "right cause (accepted)",
    "strict": "the very code (top 1)",
    "proven": "cure proven",
    "parity": "cured run within 2 %",
    "quiet": "no false alarm",
}

_ABOUT = (
    "Real failures of fine-tuning as runnable cases (`benchmarks/cases/`), each with its healthy "
    "twin, run under nanstop and under other tools. Each column counts the cases to which it "
    "applies: those whose truth has an answer of that kind. No answer is a wrong answer. A case "
    "that another tool cannot run is `n/a` for it and left out of its row; a case that nanstop "
    "cannot run is a miss. A tool that names no cause is not asked for one; on a silent case its "
    "alarm counts if its twin has none. `overhead`: median over a few healthy twins of the ratio "
    "of step times, without imports (tiny models: fixed costs show; `benchmarks/overhead.py` has "
    "a model of ordinary shape)."
)
_DEVELOPED_ON = (
    "These cases are the development set: rules and proofs were mended until they held here. "
    "When first run, nanstop named 81 % of the causes and detected 59 % of the silent ones; what a "
    "set that it has not seen gives is in `docs/first-sight.md`. *Accepted*: the first finding "
    "is one of those that are true of the case; *the very code*: it is the one that the case was "
    "made for."
)
_AGAIN = (
    "Again: `make scoreboard` (nanstop), `make scoreboard-peers` (the others). "
    "Commands, versions and the end of each output: `benchmarks/results/scoreboard/`."
)


def write_table(truths: Sequence[Truth], results: Path, page: Path) -> Board:
    """Score all that is kept under ``results``, write ``page`` and a JSON file beside the
    results; return the last lines.
    """
    kept = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*.json"))}
    healthy = said_of(kept.get("plain", {}))
    tools = sorted(
        (name for name in kept if name != "plain"), key=lambda name: (name != "nanstop", name)
    )
    boards = {tool: _rows(truths, tool, said_of(kept[tool]), healthy) for tool in tools}
    own = kept.get("nanstop", {"runs": {}})
    board = Board(lines_of(truths, boards.get("nanstop", {}), own))
    page.write_text(_page(truths, boards, kept, board))
    figures = {
        tool: {
            "rates": rates(rows.values()),
            "overhead": kept[tool].get("overhead"),
            "versions": kept[tool].get("versions"),
            "cases": rows,
        }
        for tool, rows in boards.items()
    }
    text = json.dumps({"lines": [str(line) for line in board.lines], "tools": figures}, indent=1)
    results.with_suffix(".json").write_text(text + "\n")
    return board


def _rows(
    truths: Sequence[Truth], tool: str, said: Mapping[str, Said], healthy: Mapping[str, Said]
) -> dict[str, Row]:
    rows = {}
    for truth in truths:
        case, twin = (said.get(f"{truth.name}.{one}") for one in ("case", "healthy"))
        if case is not None and twin is not None:
            plain = healthy.get(f"{truth.name}.healthy")
            loss = plain.final_loss if plain is not None else math.nan
            rows[truth.name] = score(truth, case, twin, loss, names_causes=tool == "nanstop")
    return rows


# ---- the page


def _page(
    truths: Sequence[Truth],
    boards: Mapping[str, Mapping[str, Row]],
    kept: Mapping[str, Kept],
    board: Board,
) -> str:
    return (
        "\n".join(
            [
                "# Scoreboard",
                "",
                _ABOUT,
                "",
                _DEVELOPED_ON,
                "",
                _AGAIN,
                *_parts(truths, boards, kept),
                "",
                *_tools_table(boards, kept),
                "",
                "## What must hold",
                "",
                "```",
                board.last_lines,
                "```",
                "",
                *_overhead_table(kept),
                *_cases_table(truths, boards.get("nanstop", {}), said_of(kept.get("nanstop", {}))),
                *_not_run(boards, kept),
            ]
        )
        + "\n"
    )


def _tools_table(boards: Mapping[str, Mapping[str, Row]], kept: Mapping[str, Kept]) -> list[str]:
    lines = [
        "| tool | version | cases | n/a | " + " | ".join(_TITLES.values()) + " | overhead |",
        "|" + "---|" * (len(_TITLES) + 5),
    ]
    for tool, rows in boards.items():
        ran = [row for row in rows.values() if any(value is not None for value in row.values())]
        cells = ["-" if not of else share(right, of) for right, of in rates(ran).values()]
        cost = (kept[tool].get("overhead") or {}).get("median")
        shown = [tool.replace("_", " "), _version(tool, kept[tool]), str(len(ran))]
        shown += [str(len(rows) - len(ran)), *cells, f"{cost}x" if cost else "n/a"]
        lines.append("| " + " | ".join(shown) + " |")
    return lines


def _parts(
    truths: Sequence[Truth], boards: Mapping[str, Mapping[str, Row]], kept: Mapping[str, Kept]
) -> list[str]:
    """Say which source was run, and which tools were run on part of the cases only."""
    versions = kept.get("nanstop", {}).get("versions", {})
    stack = ", ".join(f"{name} {number}" for name, number in versions.items() if name != "source")
    part = [
        f"{tool.replace('_', ' ')} ({len(rows)})"
        for tool, rows in boards.items()
        if len(rows) < len(truths)
    ]
    lines = ["", f"{stack}; source {versions.get('source', '?')}."]
    if part:
        lines += ["", f"Run so far on part of the {len(truths)} cases: {', '.join(part)}."]
    return lines


def _version(tool: str, kept: Kept) -> str:
    packages = {"msprobe": "mindstudio-probe", "DebugUnderflowOverflow": "transformers"}
    name = packages.get(tool, tool)
    versions = kept.get("versions", {})
    return versions[name] if name in versions else f"torch {versions.get('torch', '?')}"


def _overhead_table(kept: Mapping[str, Kept]) -> list[str]:
    rows = {
        tool: found["overhead"]["twins"]
        for tool, found in kept.items()
        if "twins" in found.get("overhead", {})
    }
    if not rows:
        return []
    twins = list(dict.fromkeys(twin for found in rows.values() for twin in found))
    lines = [
        "## Overhead on healthy twins",
        "",
        "Ratio of step times, each pair's, with the plain step in milliseconds.",
        "",
    ]
    lines += ["| tool | " + " | ".join(twins) + " |", "|" + "---|" * (len(twins) + 1)]
    for tool, found in rows.items():
        cells = [
            f"{', '.join(map(str, found[twin]['ratios']))} ({found[twin]['plain_ms']} ms)"
            if twin in found
            else "n/a"
            for twin in twins
        ]
        lines.append(f"| {tool.replace('_', ' ')} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _cases_table(
    truths: Sequence[Truth], rows: Mapping[str, Row], said: Mapping[str, Said]
) -> list[str]:
    lines = [
        "## nanstop, case by case",
        "",
        "| case | kind | cause | said | wrong |",
        "|---|---|---|---|---|",
    ]
    for truth in truths:
        if truth.name in rows:
            row, case = rows[truth.name], said[f"{truth.name}.case"]
            wrong = ", ".join(_TITLES[name] for name in COLUMNS if row[name] is False) or "-"
            answer = " ".join(case.answers[0]) if case.answers else "-"
            cells = (truth.name, truth.kind, ", ".join(truth.codes), answer, wrong)
            lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _not_run(boards: Mapping[str, Mapping[str, Row]], kept: Mapping[str, Kept]) -> list[str]:
    """Why a tool could not run a case, each reason once."""
    lines = []
    for tool in boards:
        reasons: dict[str, list[str]] = {}
        for name, run in kept[tool]["runs"].items():
            if run["said"]["failed"]:
                last = run["said"]["failed"].strip().splitlines()[-1][:160].replace("|", "/")
                reasons.setdefault(last, []).append(name)
        for why, names in reasons.items():
            some = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
            lines.append(f"- {tool.replace('_', ' ')}: {why} ({len(names)}: {some})")
    return ["## Runs that could not be judged", "", *lines] if lines else []
