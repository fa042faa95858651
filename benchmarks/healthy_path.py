"""What a healthy run costs: a step of its session at its beginning and at its end, and each pass
over all parameters.

    python -m benchmarks.healthy_path

Steps are measured in sessions that have come so far, in turn, and their medians shown;
microseconds, on one thread. Passes are shown in nanoseconds an element, with when they are made.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from nanstop.decide.policy import Policy
from nanstop.hosts.loop.facts import facts_of_loop
from nanstop.hosts.model.updates import resumed_state
from nanstop.hosts.model.view import PlainView
from nanstop.hosts.script.window import norm_of
from nanstop.numerics.optimizer_state import state_faults
from nanstop.numerics.tensors import nonfinite
from nanstop.numerics.token_rows import row_blocks, row_norms
from nanstop.numerics.weights import longest_step, odd_weights
from nanstop.records import StepId, StepPerRate
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.copies.rewind import SnapshotKeeper
from nanstop.replay.copies.snapshot import Snapshot, Trainable
from nanstop.session.session import Session
from nanstop.store.incidents import Store

AGES = (100, 1_000, 10_000, 100_000)
EVERY = 10
"""Steps between two logs."""
ROUNDS = 200
ELEMENTS = 1 << 23


@dataclass
class Window:
    """A window of a loop that is never run again."""

    id: StepId
    view: PlainView
    batches: tuple[dict[str, Tensor], ...]
    losses: tuple[None, ...] = (None,)


class Run:
    """A session, what keeps its way back, and how many steps it has come."""

    def __init__(self, folder: str) -> None:
        self.net = nn.Linear(64, 64)
        self.net(torch.ones(1, 64)).sum().backward()
        optimizer = torch.optim.AdamW(self.net.parameters())
        self.view = PlainView(self.net, optimizer)
        facts = facts_of_loop(self.view, nan_inf_filter=True)
        settings = {"policy": Policy(), "store": Store(folder), "announce": print}
        self.session = Session(view=self.view, facts=facts, **settings)
        self.session.start()
        self.trained = Trainable(dict(self.net.named_parameters()), optimizer)
        self.keeper = SnapshotKeeper(lambda: 1 << 34)
        self.num_steps = 0

    def step(self) -> None:
        """Do what adapters do in a healthy step, without the training."""
        session, step = self.session, self.num_steps
        window = Window(StepId(run="", step=step), self.view, ({"x": torch.zeros(8)},))
        for name in ("loss_raw", "grad_norm", "lr", "scale"):
            session.series.add(name, step, 1.0)
        session.before_update(window)  # type: ignore[arg-type]
        session.gauge_due(step)
        self.keeper.before_update(lambda: self.trained, window)  # type: ignore[arg-type]
        session.completed(step)
        self.num_steps += 1
        if self.num_steps % EVERY == 0:
            session.series.add("loss_logged", self.num_steps, 1.0)
            session.logged()


def steps() -> Iterator[str]:
    """Yield the cost of a step, logs included, and of a log alone, of runs of each age."""
    runs = {age: Run(tempfile.mkdtemp()) for age in AGES}
    for age, run in runs.items():
        while run.num_steps < age:
            run.step()
    found: dict[int, list[tuple[float, float]]] = {age: [] for age in AGES}
    for _ in range(ROUNDS):
        for age, run in runs.items():
            whole = _seconds(lambda run=run: [run.step() for _ in range(EVERY)]) / EVERY
            found[age].append((whole, _seconds(run.session.logged)))
    for age, pairs in found.items():
        whole, log = (1e6 * median(column) for column in zip(*pairs, strict=True))
        yield f"step {age:7,}: {whole:7.1f} us a step with its logs, {log:7.1f} us a log"


def passes(dtype: torch.dtype) -> Iterator[str]:
    """Yield what each pass over all parameters costs an element, and when it is made."""
    net = nn.Linear(1024, ELEMENTS // 1024, bias=False, dtype=dtype)
    weight, named = net.weight, dict(net.named_parameters())
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    trained, norms = Trainable(named, optimizer), nn.BatchNorm1d(1 << 20)
    notes, spent = BufferNotes(norms), Snapshot(trained)
    looks: tuple[tuple[str, str, Callable[[], object], int], ...] = (
        ("start", "ranges of the weights", lambda: odd_weights(named.items()), ELEMENTS),
        (
            "start",
            "rows of embedding, head",
            lambda: list(map(row_norms, row_blocks(weight))),
            ELEMENTS,
        ),
        (
            "start",
            "sizes of the weights (sampled)",
            lambda: longest_step(StepPerRate(length=1.0), optimizer.param_groups),
            ELEMENTS,
        ),
        (
            "resumed",
            "moments are possible",
            lambda: state_faults(optimizer, named.items()),
            ELEMENTS,
        ),
        ("resumed", "moments are not 0", lambda: resumed_state(optimizer), ELEMENTS),
        ("snapshot, save, end", "weights are finite", lambda: nonfinite(named), ELEMENTS),
        ("first snapshot", "copies (3 tensors)", lambda: Snapshot(trained), ELEMENTS),
        ("snapshot", "copies (3 tensors)", lambda: Snapshot(trained, spent=spent), ELEMENTS),
        ("step, where none clips", "norm of the gradients", lambda: norm_of([weight]), ELEMENTS),
        ("step 0, 1, 2, 4, 8, of float16", "gradients of 0", weight.grad.count_nonzero, ELEMENTS),
        ("micro-batch", "running statistics", notes.note, 2 << 20),
    )
    for when, what, look, number in looks:
        look()
        cost = 1e9 * median(_seconds(look) for _ in range(5)) / number
        yield f"{str(dtype)[6:]:8}  {when:32} {what:32} {cost:8.2f} ns"


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in (*steps(), *passes(torch.float32), *passes(torch.bfloat16)):
        print(line)
