"""What it adds to a healthy step that somebody follows a run (`nanstop view`), or that its numbers
go to a tracker (``log=``): calls of nanstop's functions, the share of the run that is spent on it,
interleaved pairs, and whether the run is the same to the bit.

A loop of a Qwen2 in bfloat16 autocast with a loss scale that grows, one thread. Three kinds of runs
take turns: watched; watched and followed; watched and logged. A share is the time inside of what
tells over that of the run, of the thread's processor time, as a run itself keeps it below a
thousandth; by the clock beside it, where whatever else the machine does counts too. What the first
steps take, in which a file is made and modules are imported, is told apart. The pairs are median
steps, in processor time, which on a shared machine say little.

    python -m benchmarks.telling_cost [--pairs N] [--steps N] [--size N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

import nanstop
from nanstop.session.telling.live import Live
from nanstop.session.telling.numbers import NumbersLogged
from nanstop.store.live_file import LIVE, Wish

RESULTS = Path(__file__).parent / "results" / "telling_cost.json"
OWN = str(Path(nanstop.__file__).parent)
KINDS = ("watched", "followed", "logged")
FIRST = 10
"""Steps that are not counted: the gauge samples often at the begin."""


@dataclass
class Run:
    """``seconds``: of a step, median. ``whole``, ``telling``: seconds of the run after its first
    steps, and inside of what tells: by the clock and of the processor. ``first``: inside of what
    tells in the first steps.
    """

    seconds: float = 0.0
    whole: tuple[float, float] = (0.0, 0.0)
    telling: tuple[float, float] = (0.0, 0.0)
    first: tuple[float, float] = (0.0, 0.0)
    calls: list[int] = field(default_factory=list[int])
    lines: int = 0
    digest: str = ""


def now() -> tuple[float, float]:
    """Return the time by the clock, and of the processor."""
    return time.perf_counter(), time.thread_time()


@contextmanager
def timed(owner: Any, name: str, run: Run) -> Iterator[None]:
    """Count the processor time inside of a method."""
    plain: Callable[..., Any] = getattr(owner, name)

    def method(*given: Any) -> Any:
        began = now()
        try:
            return plain(*given)
        finally:
            run.telling = tuple(
                told + after - before
                for told, after, before in zip(run.telling, now(), began, strict=True)
            )

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def trained(kind: str, num_steps: int, size: int, *, count: bool = False) -> Run:
    """Return what a run of a kind took; ``count``: of calls alone, whose times say nothing."""
    run, ends, sent = Run(), [now()], []
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=256,
            hidden_size=size,
            intermediate_size=2 * size,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    log = (lambda numbers, step: sent.append((step, dict(numbers)))) if kind == "logged" else None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=20)
    losses = []

    def loss(batch: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = model(input_ids=batch, labels=batch).loss
        losses.append(found.detach())
        return found

    tells = {"followed": (Live, "stepped"), "logged": (NumbersLogged, "_beat")}.get(kind)
    timing = timed(*tells, run) if tells is not None and not count else nullcontext()
    with tempfile.TemporaryDirectory() as out, timing:
        wish = Wish(Path(out))
        if kind == "followed":
            wish.renew()
        with nanstop.watch(model, optimizer, out=out, log=log) as watch:
            for step in range(num_steps):
                batch = torch.randint(
                    0, 256, (4, 64), generator=torch.Generator().manual_seed(step)
                )
                with counted(run, step) if count else nullcontext():
                    watch.step(loss, batch)
                    watch.update(clip=1.0, scaler=scaler)
                ends.append(now())
                if step == FIRST - 1:
                    run.first, run.telling = run.telling, (0.0, 0.0)
        assert watch.incidents == ()
        if kind == "followed":
            run.lines = len((Path(out) / LIVE).read_text().splitlines())
        run.lines = len(sent) or run.lines
    steps = [after[1] - before[1] for before, after in pairwise(ends)]
    run.seconds = median(steps[FIRST:])
    run.whole = tuple(end - begin for end, begin in zip(ends[-1], ends[FIRST], strict=True))
    run.digest = digest(model, losses)
    return run


@contextmanager
def counted(run: Run, step: int) -> Iterator[None]:
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            found[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
        if step >= FIRST:
            run.calls.append(found.total())


def digest(model: torch.nn.Module, losses: list[torch.Tensor]) -> str:
    """Return what tells two runs apart that differ in one bit of a weight or a loss."""
    kept = hashlib.sha256()
    for one in (*model.state_dict().values(), *losses):
        kept.update(one.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return kept.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--size", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trained("watched", FIRST + 3, options.size)
    runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for pair in range(options.pairs):
        for kind in KINDS if pair % 2 else KINDS[::-1]:
            runs[kind].append(trained(kind, options.steps, options.size))
    calls = {
        kind: median(trained(kind, FIRST + 9, options.size, count=True).calls) for kind in KINDS
    }
    digests = {run.digest for kind in KINDS for run in runs[kind]}
    rows = []
    table = Table(title="What telling adds to a healthy step")
    for column in (
        "run",
        "calls a step",
        "ms a step",
        "pairs, ms",
        "share of the run, by the clock",
        "first, ms",
        "told",
        "ms each",
    ):
        table.add_column(column, justify="left" if column == "run" else "right")
    for kind in KINDS:
        own = [run.seconds for run in runs[kind]]
        added = [1e3 * (a - b.seconds) for a, b in zip(own, runs["watched"], strict=True)]
        shares = [
            sum(run.telling[at] for run in runs[kind]) / sum(run.whole[at] for run in runs[kind])
            for at in (1, 0)
        ]
        told = median(run.lines for run in runs[kind])
        spread = f"{median(added):+.2f} ({min(added):+.2f} .. {max(added):+.2f})"
        table.add_row(
            kind,
            f"{calls[kind]:.0f}",
            f"{1e3 * median(own):.1f}",
            spread if kind != "watched" else "-",
            " / ".join(f"{100 * share:.4f} %" for share in shares),
            f"{1e3 * median(run.first[1] for run in runs[kind]):.2f}",
            f"{told:.0f}",
            f"{1e3 * sum(run.telling[1] for run in runs[kind]) / max(told * len(own), 1):.2f}",
        )
        rows.append({"kind": kind, "calls": calls[kind], "shares": shares, "added_ms": added})
        rows[-1]["runs"] = [asdict(run) for run in runs[kind]]
    Console().print(table)
    print(f"all runs the same to the bit: {len(digests) == 1}")
    setting = {"python": platform.python_version(), "torch": torch.__version__, **vars(options)}
    RESULTS.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1) + "\n")
    assert len(digests) == 1


if __name__ == "__main__":
    sys.exit(main())
