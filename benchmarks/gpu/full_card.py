"""An investigation in what is left of a full card: which float32 reference, which verdict, how much
memory and time beyond the step's own?

A Qwen2 in float16 is trained in full, in a process of its own. Once its peak is known, the process
may have a tenth of it more of the card than its allocator reserved
(``set_per_process_memory_fraction``: an allocation beyond it fails as on a full one); then a step
comes in which one layer overflows for one rare token. A run that comes to no end in its seconds is
a row of what was known of it by then.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gpu.machine import Machine, Row

RUNS = (
    {"size": "1.5B", "momentum": 0.9, "seconds": 100},
    {"size": "7B", "momentum": 0.0, "seconds": 240},
)


def run(machine: Machine) -> Iterator[Row]:
    """Yield a row for each size; none takes longer than the minutes of a part."""
    given = ({"size": "toy", "momentum": 0.9, "seconds": 300},) if machine.toy else RUNS
    if not machine.has_cuda:
        machine.lack("a bound, and peaks: a CPU has no allocator that keeps account")
    for one in given:
        if machine.goes_on(str(one["size"])):
            seconds = min(float(one["seconds"]), 60.0 * machine.minutes)
            yield _apart(machine, one | {"seconds": seconds})


def _apart(machine: Machine, given: dict[str, Any]) -> Row:
    """Return what one run came to, in a process of its own: what it wrote last."""
    if machine.has_cuda:
        torch.cuda.empty_cache()
    command = [sys.executable, "-m", "gpu.full_card_run", json.dumps(given | {"toy": machine.toy})]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        options: dict[str, Any] = {
            "stdout": said,
            "stderr": errors,
            "cwd": Path(__file__).parents[1],
            "env": os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        }
        try:
            code = subprocess.run(
                command, timeout=given["seconds"], check=False, **options
            ).returncode
            ended = "" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            ended = f"no end in {given['seconds']:g} s"
        said.seek(0)
        errors.seek(0)
        lines = [line for line in said.read().splitlines() if line.startswith("{")]
        row: Row = json.loads(lines[-1]) if lines else {"size": given["size"]}
        if ended:
            row["went on"] = f"NO: {ended}; {_last_words(errors.read().strip().splitlines())}"
    return row


def _last_words(lines: list[str]) -> str:
    """Return where nanstop was when the time was over, the innermost first, or how it ended."""
    frames = [line.strip() for line in lines if line.startswith("  File") and "nanstop" in line]
    where = (line.rpartition("nanstop/")[2].replace('", line', "") for line in frames[:6])
    return " < ".join(where) or "".join(lines[-1:])[:200]
