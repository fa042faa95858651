"""A long watched run with a fault now and then: does it stay what it was?

A small loop with a loss scaler is trained for 20,000 watched steps. In each 200 of them one step
has a fault, drawn at random: a NaN or an infinity among its inputs, an outlier whose square no
format holds, or a loss scale at which gradients overflow. Shown and asked: memory after the first
quarter and at the end, weights that are not finite after any step, what became of each fault and of
each step that had none.

    python -m benchmarks.soak [--steps N] [--every N] [--seed N]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import nanstop

RESULTS = Path(__file__).parent / "results" / "soak.json"
KINDS = ("NaN", "Inf", "outlier", "scaler skip")
FLAT = 0.01
"""By how much of itself memory may grow after the first quarter."""
WIDTH, BATCH, SCALE = 16, 8, 8.0
LOSS = 1e3
"""What losses are multiplied by, so that gradients overflow at the largest scale."""
SAMPLES = 40


@dataclass(slots=True)
class Soak:
    """What was planted and what became of it, by step; ``memory``: (step, MiB, objects)."""

    planted: dict[int, str] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    told: dict[str, int] = field(default_factory=dict)
    """How often each finding was told."""
    told_at: set[int] = field(default_factory=set)
    """The first step of each incident."""
    num_bad_weights: int = 0
    memory: list[tuple[int, float, int]] = field(default_factory=list)
    seconds: float = 0.0


def plan(num_steps: int, every: int, seed: int) -> dict[int, str]:
    """Return the faults: in each ``every`` steps one, at a place and of a kind drawn at random."""
    draw = random.Random(seed)
    starts = range(0, num_steps - every + 1, every)
    return {start + draw.randrange(every): draw.choice(KINDS) for start in starts}


def batch_of(step: int, fault: str | None) -> Tensor:
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
    value = {"NaN": float("nan"), "Inf": float("inf"), "outlier": 1e30}.get(fault or "")
    if value is not None:
        inputs[step % BATCH, step % WIDTH] = value
    return inputs


def soak(num_steps: int, every: int, seed: int) -> Soak:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2 * num_steps)
    found, process = Soak(planted=plan(num_steps, every, seed)), psutil.Process()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as out, nanstop.watch(model, optimizer, out=out) as watch:
        for step in range(num_steps):
            fault = found.planted.get(step)
            if fault == "scaler skip":
                scaler.update(2.0**127)
            watch.step(lambda given: LOSS * model(given).square().mean(), batch_of(step, fault))
            if watch.update(clip=1.0, scaler=scaler) is None:
                found.left_out.add(step)
            if fault == "scaler skip":
                scaler.update(SCALE)
            found.num_bad_weights += not all(bool(p.isfinite().all()) for p in model.parameters())
            if step % max(1, num_steps // SAMPLES) == 0:
                gc.collect()
                held = process.memory_info().rss / 2**20
                found.memory.append((step, held, len(gc.get_objects())))
        for report in watch.incidents:
            code = report.diagnoses[0].code
            found.told[code] = found.told.get(code, 0) + report.count
            found.told_at.add(report.incident.at.step)
    found.seconds = time.monotonic() - began
    return found


def growth(found: Soak, place: int) -> float:
    """Return by how much of itself a measure (1: memory, 2: objects) grew from the second quarter
    of the samples to the last.
    """
    samples = [sample[place] for sample in found.memory]
    quarter = len(samples) // 4
    return median(samples[-quarter:]) / median(samples[quarter : 2 * quarter]) - 1.0


def problems(found: Soak) -> list[str]:
    """Return what was not as it is to be, a line each."""
    bad = set(found.planted)
    failures = [step for step, kind in found.planted.items() if kind != "scaler skip"]
    untold = len(failures) - sum(found.told.values())
    rows = [
        (found.num_bad_weights, "steps after which a weight was not finite"),
        (len(found.left_out - bad), "healthy steps were left out"),
        (len(bad - found.left_out), "steps with a fault were applied"),
        (len(found.told_at.difference(failures)), "incidents began at steps without a failure"),
        (untold, "more failures than were told"),
    ]
    lines = [f"{number} {what}" for number, what in rows if number]
    if growth(found, 1) > FLAT:
        lines.append(f"memory grew by {growth(found, 1):.1%}")
    return lines


def shown(found: Soak) -> Table:
    table = Table(title="A long watched run")
    for column in ("fault", "planted", "left out"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    counts = Counter(found.planted.values())
    for kind in KINDS:
        steps = {step for step, planted in found.planted.items() if planted == kind}
        table.add_row(kind, str(counts[kind]), str(len(steps & found.left_out)))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = soak(options.steps, options.every, options.seed)
    wrong = problems(found)
    Console().print(shown(found))
    print(
        f"{options.steps} steps in {found.seconds:.0f} s; memory {growth(found, 1):+.2%}, objects "
        f"{growth(found, 2):+.2%} from the second quarter to the last; {found.num_bad_weights} "
        "steps with a weight that is not finite"
    )
    print("told: " + ", ".join(f"{code} {number} times" for code, number in found.told.items()))
    print("\n".join(wrong) or "all as it is to be")
    written = asdict(found) | {n: sorted(getattr(found, n)) for n in ("left_out", "told_at")}
    RESULTS.write_text(json.dumps({"setting": vars(options), **written}, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
