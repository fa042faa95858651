"""What watching adds to a healthy step whatever the model's size: calls of nanstop's functions, and
milliseconds.

One thread, a Qwen2 of one layer. Trainings with and without a watch take turns in one process; the
time is the thread's processor time of the median step, and the difference the median over pairs
with its 95 % interval (bootstrap). Calls do not depend on the machine; milliseconds do.

    python -m benchmarks.step_cost [--pairs N] [--only WORD] [--calls]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median

import torch
from benchmarks.fixed_cost.calls import FIRST, calls_a_step
from benchmarks.fixed_cost.trainings import TRAININGS, Training
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "step_cost.json"


@dataclass(frozen=True)
class Row:
    """``plain``, ``added``, ``low``, ``high``: milliseconds of a step."""

    training: str
    calls: float
    plain: float
    added: float
    low: float
    high: float


def step_milliseconds(training: Training, *, watched: bool, num_steps: int) -> float:
    """Return the time of the median step after the first ``FIRST``."""
    ends: list[float] = []
    training(num_steps, watched, lambda _: ends.append(time.thread_time()))
    steps = [after - before for before, after in zip(ends[FIRST:], ends[FIRST + 1 :], strict=False)]
    return 1e3 * median(steps)


def measure(name: str, *, num_pairs: int, num_steps: int) -> Row:
    training, plain, added = TRAININGS[name], [], []
    calls = sum(calls_a_step(training).values())
    for pair in range(num_pairs):
        order = (False, True) if pair % 2 else (True, False)
        found = {
            watched: step_milliseconds(training, watched=watched, num_steps=num_steps)
            for watched in order
        }
        plain.append(found[False])
        added.append(found[True] - found[False])
    draw = random.Random(0)
    medians = sorted(median(draw.choices(added, k=len(added))) for _ in range(2000))
    low, high = medians[int(0.025 * len(medians))], medians[int(0.975 * len(medians))]
    return Row(name, calls, median(plain), median(added), low, high)


def shown(rows: list[Row]) -> Table:
    table = Table(title="What watching adds to a healthy step")
    for column in ("training", "calls", "plain ms", "added ms", "95 % interval"):
        table.add_column(column, justify="left" if column == "training" else "right")
    for row in rows:
        interval = f"{row.low:.2f} .. {row.high:.2f}"
        table.add_row(
            row.training, f"{row.calls:.0f}", f"{row.plain:.2f}", f"{row.added:.2f}", interval
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--only", default="", help="trainings whose name holds this word")
    parser.add_argument("--calls", action="store_true", help="count only, function by function")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in TRAININGS if options.only in name]
    if options.calls:
        for name in names:
            found = calls_a_step(TRAININGS[name])
            print(f"{name}: {sum(found.values()):.1f} calls a step")
            for function, number in list(found.items())[:40]:
                print(f"  {number:7.2f}  {function}")
        return
    rows = [measure(name, num_pairs=options.pairs, num_steps=options.steps) for name in names]
    Console().print(shown(rows))
    setting = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version(name) for name in ("torch", "transformers", "trl")},
    }
    written = {"setting": setting | vars(options), "rows": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
