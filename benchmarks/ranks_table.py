"""What ranks ask their store, as a section of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "ranks.json"
NUM_STEPS, REPORTED = 20, 1024
TEXT = """## What ranks ask each other

Written by `python benchmarks/ranks.py`. A loop of {steps} steps under `DistributedDataParallel`
(gloo, one machine), healthy or with a NaN in one rank's data, which one rank investigates and all
redo without. Watching makes no collective of its own: ranks write into the key-value store that
they have met in. Counted are their requests to it and the characters of keys and values;
extrapolated rows lie on the line through the two largest runs that were counted.

{table}

A healthy rank asks in its first backwards whether all are watched under the same policy and whether
its batches are those of the others, and after
backwards 0, 1, 2, 4, 8, 64 and every 512th whether its copy is that of the others: the number
of ranks makes no difference. In a failing step rank 0
reads what each rank says to a question, and writes it down as one text, each answer once. Other
ranks read that text; they wait for it at the store, without asking again and again. Host reads are
those of one process: the norm that decides is one value a step.

One failure is one folder, of the rank that has investigated it; the summary of a healthy run is
written by rank 0, and by others only where they have something else to say. Ranks that cannot agree
each write what they see: {num} incidents of as many ranks are read and listed, as one line, in
{seconds:.1f} s of processor time.
"""


def section(kept: dict[str, Any]) -> str:
    """Return the section of the page, from what is kept of the counts."""
    head = "| ranks | run | rank 0 asks | another rank at most | bytes of all ranks | files |"
    lines = [head, "|---:|---|---:|---:|---:|---:|"]
    for one in kept["rows"]:
        what = "with a failure" if one["fault"] else "healthy"
        what += "" if one["counted"] else ", extrapolated"
        numbers = " | ".join(f"{one[name]:,}" for name in ("first", "others", "sent", "files"))
        lines.append(f"| {one['size']:,} | {what} | {numbers} |")
    given = {"steps": NUM_STEPS, "num": REPORTED, "seconds": kept["read_back"]}
    return TEXT.format(table="\n".join(lines), **given)
