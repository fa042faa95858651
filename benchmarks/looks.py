"""What the looks at a healthy run take of its steps: the stations at which silent faults are looked
for at updates 0, 1, 2, 4, 8, ..., the tests of what they showed, and whatever else is done in some
steps and not in each.

One thread, float32, a Qwen2 of 6 layers of 384 and a batch of 4 x 32, under each host. Plain and
watched runs of the same steps take turns in one process, in processor time of the thread. Looked at
are the steps in which markedly more of nanstop's functions are called than in the ordinary one,
each time that a small model is trained under the same host. What such a step takes beyond the
ordinary step of its run, less what it takes so in the plain run, is its look. Looks at ranges,
which come by the clock and have a share of the time of their own, are told by their own account.
What a process imports and prepares once for its first looks is told apart: the first steps of a run
of a small model, less those of the next one.

    python -m benchmarks.looks [--pairs N] [--steps N] [--only WORD]
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType

import torch
from benchmarks.fixed_cost.calls import OWN
from benchmarks.fixed_cost.trainings import Shape, Training, loop, plain_trainer, script, trainer
from rich.console import Console
from rich.table import Table

from nanstop.detect.gauge import Gauge

RESULTS = Path(__file__).parent / "results" / "looks.json"
LARGE = Shape(layers=6, hidden=384, heads=6, length=32)
TINY = Shape(length=32)
MARKEDLY = 1.2
SETTLED = 10
"""Steps after which a run has warmed up."""
BUDGET = 0.003
"""Of the steps, for the looks at steps 0, 1, 2, 4, 8, ... together."""


def trainings(shape: Shape) -> dict[str, Training]:
    build = partial(plain_trainer, length=shape.length)
    return {
        "script": partial(script, scaled=False, num_micro=1, shape=shape),
        "loop": partial(loop, scaled=False, num_micro=1, shape=shape),
        "trainer": partial(trainer, build=build, num_micro=1, shape=shape),
    }


@dataclass(frozen=True)
class Row:
    """``plain``: milliseconds of the ordinary plain step. ``looks``: of the look in each step that
    has one. ``ranges``: of the looks at ranges in the whole run. ``first``: once a process.
    """

    training: str
    plain: float
    looks: dict[int, float]
    ranges: float
    first: float

    @property
    def whole(self) -> float:
        return sum(self.looks.values())

    @property
    def early(self) -> float:
        """Of steps 0, 1, 2, 4, 8, ... alone."""
        return sum(took for step, took in self.looks.items() if step & (step - 1) == 0)


def step_milliseconds(training: Training, num_steps: int, *, watched: bool) -> list[float]:
    ends: list[float] = []
    training(num_steps, watched, lambda _: ends.append(time.thread_time()))
    return [1e3 * (after - before) for before, after in pairwise(ends)]


def calls(training: Training, num_steps: int) -> list[int]:
    """Return how many of nanstop's functions are called in each step of a watched run."""
    steps: list[int] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            steps[-1] += 1

    def after(_: int) -> None:
        sys.setprofile(None)
        steps.append(0)
        sys.setprofile(count)

    training(num_steps, True, after)
    sys.setprofile(None)
    return steps[:num_steps]


def looked_at(training: Training, num_steps: int) -> list[int]:
    """Return the steps in which more is done than in others; what comes by the clock is in others
    each time.
    """
    runs = [calls(training, num_steps) for _ in range(2)]
    least, ordinary = map(min, zip(*runs, strict=True)), median(runs[0])
    return [step for step, num in enumerate(least) if num > MARKEDLY * ordinary]


@contextmanager
def gauges() -> Iterator[set[Gauge]]:
    """Yield what will hold the gauge of each run inside."""
    found, stepped = set[Gauge](), Gauge.stepped

    def method(gauge: Gauge, step: int) -> object:
        found.add(gauge)
        return stepped(gauge, step)

    Gauge.stepped = method  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Gauge.stepped = stepped  # type: ignore[method-assign]


def measure(name: str, *, num_pairs: int, num_steps: int) -> Row:
    tiny, large = trainings(TINY)[name], trainings(LARGE)[name]
    once, again = (sum(step_milliseconds(tiny, SETTLED, watched=True)) for _ in range(2))
    looked = looked_at(tiny, num_steps)
    others = [step for step in range(SETTLED, num_steps) if step not in looked]
    plain: list[float] = []
    added: dict[int, list[float]] = {step: [] for step in looked}
    with gauges() as met:
        for pair in range(num_pairs):
            taken: dict[bool, list[float]] = {}
            for watched in (False, True) if pair % 2 else (True, False):
                taken[watched] = step_milliseconds(large, num_steps, watched=watched)
            usual = {
                watched: median(run[step] for step in others) for watched, run in taken.items()
            }
            plain.append(usual[False])
            for step in looked:
                more = {kind: run[step] - usual[kind] for kind, run in taken.items()}
                added[step].append(more[True] - more[False])
    ranges = 1e3 * sum(gauge._spent for gauge in met) / max(len(met), 1)
    looks = {step: median(each) for step, each in added.items()}
    return Row(name, median(plain), looks, ranges, once - again)


def shown(rows: list[Row], num_steps: int) -> Table:
    table = Table(title=f"What looks take in {num_steps} steps")
    columns = ("training", "step, ms", "looks", "ms in all", "share", "early ms", "share")
    for column in (*columns, "ranges", "once, ms"):
        table.add_column(column, justify="left" if column == "training" else "right")
    for row in rows:
        whole = num_steps * row.plain
        table.add_row(
            row.training,
            f"{row.plain:.1f}",
            f"{len(row.looks)}",
            f"{row.whole:.0f}",
            f"{100 * row.whole / whole:.3f} %",
            f"{row.early:.0f}",
            f"{100 * row.early / whole:.3f} %",
            f"{100 * row.ranges / whole:.3f} %",
            f"{row.first:.0f}",
        )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--only", default="", help="trainings whose name holds this word")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in trainings(TINY) if options.only in name]
    rows = [measure(name, num_pairs=options.pairs, num_steps=options.steps) for name in names]
    Console().print(shown(rows, options.steps))
    setting = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        **{name: version(name) for name in ("torch", "transformers")},
    }
    written = {"setting": setting | vars(options), "rows": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(written, indent=1) + "\n")
    return int(any(row.early > BUDGET * options.steps * row.plain for row in rows))


if __name__ == "__main__":
    sys.exit(main())
