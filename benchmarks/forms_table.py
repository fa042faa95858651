"""The page of the forms: what was proposed, proven and typed, and how the fixed scripts ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from scoreboard_lines import share

NEAR = 0.02
"""How far a fixed script's last loss may be from its twin's, as a part of it."""
FORMS = ("in log space", "a value where it has none", "clamp the argument", "` in float32")
_ABOUT = """# Failing lines and the change that was typed

Scripts that fail in one line (`benchmarks/forms/`), each after a public thread. Each has a healthy
twin: the same script without the row that makes it fail. Each runs with the failure under
`nanstop run`; `nanstop fix --apply` changes the script; then it runs plain, without nanstop, with
the failure still in its data. Fixed: it ends with a finite loss within 2 % of its twin's.

Again: `make forms`. All that was said, with the diffs: `benchmarks/results/forms.json`.
"""


def page(kept: Mapping[str, Any]) -> tuple[str, str]:
    """Return the page, and its figures alone."""
    rows = {name: _row(found) for name, found in kept.items()}
    figures = "\n".join(_figures(rows))
    table = [
        "| script | thread | line | proposed | proof | fix | ends, of its twin |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(_cells(name, kept[name], row))} |" for name, row in rows.items()),
    ]
    return "\n\n".join((_ABOUT.strip(), figures, "\n".join(table))) + "\n", figures


def _row(found: Mapping[str, Any]) -> dict[str, Any]:
    incidents = found["watched"]["incidents"]
    first = incidents[0] if incidents else {}
    remedy = first.get("remedy") or ""
    twin = found["twin"]["final_loss"]
    ended = found.get("fixed", {})
    is_finite = bool(twin) and ended.get("final_loss") is not None and ended["finite"]
    ratio = ended["final_loss"] / twin if is_finite else math.nan
    line = (first.get("source") or "").rpartition(":")[2]
    return {
        "remedy": remedy,
        "proposed": any(word in remedy for word in FORMS),
        "proven": first.get("verdict") == "proven",
        "verdict": first.get("verdict") or "",
        "line": line.isdecimal() and int(line) in found["lines"],
        "status": found["fix"]["status"],
        "ratio": ratio,
        "fixed": found["fix"]["status"] == "applied" and abs(ratio - 1) <= NEAR,
    }


def _figures(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    total = len(rows)
    count = {
        key: sum(bool(row[key]) for row in rows.values()) for key in ("line", "proposed", "fixed")
    }
    proven = sum(row["proposed"] and row["proven"] for row in rows.values())
    proposed = share(count["proposed"], total)
    return [
        "| of all scripts | |",
        "|---|---|",
        f"| the failing line is named | {share(count['line'], total)} |",
        f"| a form that is stable, guarded, or in float32 is proposed | {proposed} |",
        f"| proven | {share(proven, total)} |",
        f"| fixed by the diff that `nanstop fix --apply` writes | {share(count['fixed'], total)} |",
    ]


def _cells(name: str, found: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[str, ...]:
    owner, repository, _, number = found["link"].split("/")[-4:]
    ends = "not finite" if math.isnan(row["ratio"]) else f"{row['ratio']:.4f}"
    return (
        f"`{name}`",
        f"[{owner}/{repository}#{number}]({found['link']})",
        "yes" if row["line"] else "no",
        row["remedy"].replace("|", "\\|") or "nothing",
        row["verdict"],
        row["status"],
        ends,
    )
