"""An investigation in what a nearly full machine has left: which float32 reference, which verdict,
how much memory beyond the step's own?

A decoder in float16 with AdamW is trained in a process of its own. Once its own peak is known, the
process is bounded to that, 32 MiB for records, reports and code, and a share more (``RLIMIT_AS``,
so that an allocation beyond it fails as on a full card); then a step comes in which one layer
overflows. Shown, by size of the model and by what is left: whether the run went on, the verdict and
what it was held against in float32, the peak over the step's own, and how long the investigation
took in micro-batches.

    python -m benchmarks.memory_ladder [--sizes N ...] [--left SHARE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "memory_ladder.json"
SIZES = ((256, 4), (384, 4), (384, 6), (512, 6))
"""Width and layers."""
LEFT = (0.5, 0.1)
"""What the process may have beyond the step's own peak, as a share of what training holds."""

ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""The C library keeps no address space for later, which the bound would count as used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """``own``: what training holds at its peak, in MiB; ``above``: by how much of it the
    investigation exceeded that; ``times``: how many micro-batches it took as long as.
    """

    width: int
    layers: int
    parameters: int
    left: float
    went_on: bool
    own: float = 0.0
    above: float = 0.0
    verdict: str = ""
    cure: str = ""
    scope: str = ""
    outcome: str = ""
    times: float = 0.0
    unchanged: bool = False
    said: tuple[str, ...] = ()


def measured(width: int, layers: int, left: float) -> Row:
    """Return what one bounded run came to, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory_ladder_run"]
    given = json.dumps({"width": width, "layers": layers, "left": left})
    environ = os.environ | ALLOCATOR | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, given], capture_output=True, text=True, env=environ, check=False, timeout=900
    )
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return Row(width=width, layers=layers, parameters=0, left=left, went_on=False)
    found = json.loads(done.stdout.splitlines()[-1])
    return Row(**found | {"said": tuple(found["said"])})


def shown(rows: list[Row]) -> Table:
    table = Table(title="Investigated in what is left")
    for column in (
        "parameters",
        "own peak",
        "left",
        "went on",
        "verdict",
        "float32",
        "peak",
        "time",
    ):
        table.add_column(column, justify="right" if column in ("own peak", "left") else "left")
    for row in rows:
        table.add_row(
            f"{row.parameters / 1e6:.1f} M",
            f"{row.own:.0f} MiB",
            f"{row.left:+.0%}",
            "yes" if row.went_on and row.unchanged else "NO",
            f"{row.verdict or 'none'} {row.cure}",
            row.scope,
            f"{row.above:+.1%}",
            f"{row.times:.0f} micro-batches",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="*", default=range(len(SIZES)))
    parser.add_argument("--left", type=float, nargs="*", default=LEFT)
    options = parser.parse_args()
    rows: list[Row] = []
    for place, left in product(options.sizes, options.left):
        rows.append(measured(*SIZES[place], left))
        print(rows[-1], flush=True)
    Console(width=140).print(shown(rows))
    RESULTS.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return int(not all(row.went_on and row.unchanged for row in rows))


if __name__ == "__main__":
    sys.exit(main())
