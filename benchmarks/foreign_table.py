"""The page of the foreign scripts: what was seen of each, and the lines that must hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from foreign_runs import POLICIES, scripts

Row = Mapping[str, Any]

_ABOUT = """# Foreign scripts

Training scripts after the shape of well-known public ones, written for this
(`benchmarks/foreign/`); not one knows of nanstop. Each is run plain and watched, in each
precision that is natural for it, under every policy. In health the CRC32 of all weights and
buffers and of the random state after every step, the losses, the outputs, stdout, stderr and the
exit code must be those of the plain run, and nothing may be said but that a script is not watched
(weights updated by hand, threads that share a model), which is counted apart. With a fault,
`observe` must change nothing; under the other policies no exception may come that the plain run
has not (but nanstop's own stop, exit 3), no weights may break that stay finite in the plain run,
and the model at the end may not be worse (loss more than 5 % above).

Again: `make foreign`. What each run said: `benchmarks/results/foreign.json`.
"""


def last_lines(rows: Mapping[str, Row]) -> str:
    """Return the lines that must hold, each with what was seen."""
    every = list(rows.values())
    healthy = [row for row in every if row["fault"] == "none"]
    lines = []
    for dtype in ("fp32", "bf16", "fp16-scaler"):
        of = [row for row in healthy if row["dtype"] == dtype]
        lines.append(_line(f"healthy, {dtype}: bitwise, and nothing said", of))
    lines.append(_line("healthy, as `nanstop run` starts it", [r for r in healthy if r["cold"]]))
    faults = [row for row in every if row["fault"] != "none"]
    for policy in POLICIES:
        of = [row for row in faults if row["policy"] == policy]
        lines.append(_line(f"with a fault, {policy}: no harm", of))
    alarms = sum(bool(row["said"]) for row in healthy)
    lines.append(
        f"{'ok' if not alarms else 'MISSED':6} false alarms: {alarms} of {len(healthy)} runs"
    )
    return "\n".join(lines)


def _line(what: str, rows: list[Row]) -> str:
    names = {row["script"] for row in rows}
    bad = {row["script"] for row in rows if row["wrong"]}
    good = "ok" if names and not bad else "MISSED"
    unwatched = {row["script"] for row in rows if row["unwatched"]}
    apart = f", of them not watched: {', '.join(sorted(unwatched))}" if unwatched else ""
    return f"{good:6} {what}: {len(names - bad)} of {len(names)} scripts ({len(rows)} runs){apart}"


def write_page(rows: Mapping[str, Row], page: Path) -> None:
    """Write the page."""
    every = list(rows.values())
    parts = [_ABOUT, "```", last_lines(rows), "```", "", *_healthy(every), *_faults(every)]
    page.write_text("\n".join([*parts, *_wrong(rows)]) + "\n")


def _healthy(rows: list[Row]) -> list[str]:
    lines = [
        "## In health",
        "",
        "| script | precisions | " + " | ".join(POLICIES) + " | steps | loss at the end |",
        "|---" * (4 + len(POLICIES)) + "|",
    ]
    for script in scripts():
        mine = [r for r in rows if r["script"] == script.name and r["fault"] == "none"]
        if not mine:
            continue
        cells = [_cell([r for r in mine if r["policy"] == policy]) for policy in POLICIES]
        plain = mine[0]["plain"]
        shown = [script.name, ", ".join(script.dtypes), *cells, str(plain["steps"]), _loss(plain)]
        lines.append("| " + " | ".join(shown) + " |")
    return [*lines, ""]


def _cell(rows: list[Row]) -> str:
    bad = [row for row in rows if row["wrong"]]
    if bad:
        return "; ".join(f"{r['dtype']}: {r['wrong'][0]}" for r in bad)
    equal = "equal, but not watched" if any(row["unwatched"] for row in rows) else "equal"
    return equal if rows else ""


def _faults(rows: list[Row]) -> list[str]:
    lines = [
        "## With a fault",
        "",
        "How a run ended: the loss of the model at its end, `nan` where that or a weight is not",
        "finite, else how it was cut off.",
        "",
        "| script | fault | precision | plain | " + " | ".join(POLICIES) + " | said |",
        "|---" * (5 + len(POLICIES)) + "|",
    ]
    faults = [row for row in rows if row["fault"] != "none"]
    for key in dict.fromkeys((r["script"], r["fault"], r["dtype"]) for r in faults):
        mine = [r for r in faults if (r["script"], r["fault"], r["dtype"]) == key]
        by_policy = {row["policy"]: row for row in mine}
        cells = [_ended(by_policy[policy]) if policy in by_policy else "" for policy in POLICIES]
        said = ", ".join(dict.fromkeys(code for row in mine for code in row["said"]))
        shown = [*key, _loss(mine[0]["plain"]), *cells, said or "nothing"]
        lines.append("| " + " | ".join(shown) + " |")
    return [*lines, ""]


def _ended(row: Row) -> str:
    shown = _loss(row["watched"])
    return f"**{shown}**" if row["wrong"] else shown


def _loss(ending: Mapping[str, Any]) -> str:
    if ending["code"] == 3:
        return f"stopped at {ending['steps']}"
    if ending["loss"] is None:
        return f"exit {ending['code']} at {ending['steps']}"
    return f"{float(ending['loss']):.4g}" if ending["finite"] else "nan"


def _wrong(rows: Mapping[str, Row]) -> Iterable[str]:
    yield "## What is not as it must be"
    yield ""
    bad = {name: row for name, row in rows.items() if row["wrong"]}
    yield from (f"- `{name}`: {_text(row)}" for name, row in bad.items())
    if not bad:
        yield "Nothing."


def _text(row: Row) -> str:
    return "; ".join(row["wrong"]).replace("|", "\\|")
