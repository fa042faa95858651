"""What watching adds to the time of a step of several ranks, as a table and a page's section."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "ranks_overhead.json"
BOUND, MOST_BYTES = 1.02, 16.0
"""Upper end of the interval of the ratio, and bytes a step and rank."""
_COLUMNS = ("step", "watched/plain", "95 %", "plain/plain", "95 %", "bytes a step and rank")
TEXT = """## What watching adds to a step of {processes} processes

Written by `python benchmarks/ranks_overhead.py`. A transformer of {size} on
{processes} processes (gloo, one machine of {cores} cores), each under its own `nanstop run` or
none; {pairs} rounds of three runs of {steps} steps in alternating order, two of them plain. The
second ratio is what the machine itself makes of two plain runs. Geometric means, bootstrap over
rounds.

{table}

Bytes are what nanstop sends after the first {warm_up} steps: requests to the store of the ranks,
keys and values, and what is reduced. It asks the store ever more seldom: over more steps they are
fewer.

The smaller the step, the more it shows: a watched step of a model of 4.7 million parameters
took two to five milliseconds more of each process, which four on two cores pay for twice. At
245 ms a step the ratio was 1.035 under DDP (1.026 .. 1.042, beside 1.001 of two plain runs), in
an earlier run.
"""


def holds(row: dict[str, Any]) -> bool:
    """Return whether watching keeps its bounds."""
    return row["high"] <= BOUND and row["bytes"] <= MOST_BYTES


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['kind']}",
        f"{1e3 * row['seconds']:.0f} ms",
        f"{row['ratio']:.3f}",
        f"{row['low']:.3f} .. {row['high']:.3f}",
        f"{row['null']:.3f}",
        f"{row['null_low']:.3f} .. {row['null_high']:.3f}",
        f"{row['bytes']:.1f}",
    )


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table("", *_COLUMNS, title="Cost of watching several ranks")
    for row in rows:
        table.add_row(*_cells(row))
    return table


def section(kept: dict[str, Any]) -> str:
    """Return the section of the page, from what is kept."""
    head = "| | " + " | ".join(_COLUMNS) + " |\n|---|" + "---:|" * len(_COLUMNS)
    lines = ["| " + " | ".join(_cells(row)) + " |" for row in kept["rows"]]
    size = f"{kept['rows'][0]['parameters'] / 1e6:.1f} million parameters"
    return TEXT.format(table="\n".join((head, *lines)), size=size, **kept["setting"])
