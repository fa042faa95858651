"""How often the host waits for the device in a step, watched and not, by torch's profiler."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

import nanstop
from gpu import models
from gpu.machine import Machine, Row
from gpu.trainer import trained

STEPS = 9
"""Steps that are counted, each on its own: the clock says when the gauge looks at one of them, so
that the usual one is their median.
"""
FIRST = 20
"""Watched steps before those that are counted: none of these is one that is looked at more closely
by its number (2^n, and the one after it).
"""
WAITS = {
    "reads of a number": ("aten::_local_scalar_dense",),
    "copies to the host": ("Memcpy DtoH",),
    "waits for a stream": ("cudaStreamSynchronize",),
    "waits for the device": ("cudaDeviceSynchronize",),
    "waits for an event": ("cudaEventSynchronize", "cudaStreamWaitEvent"),
}


def run(machine: Machine) -> list[Row]:
    """Return a row for each kind of wait: how many a step, plain and watched, and in the one of the
    watched steps that waited most.
    """
    if not machine.has_cuda:
        machine.lack("copies and waits: a CPU has none; only reads of a number are counted")
    model = models.qwen2("toy" if machine.toy else "0.5B", machine).train()
    optimizer = models.optimizer_of(model, machine)
    given = models.batch(model, machine, 2, 16 if machine.toy else 512)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    def plain() -> None:
        loss(given).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as out, nanstop.watch(model, optimizer, out=out) as watch:

        def watched() -> None:
            watch.step(loss, given)
            watch.update(clip=1.0)

        for _ in range(FIRST):
            watched()
        counts = {"plain": _counted(plain, machine), "watched": _counted(watched, machine)}
    rows = _rows("loop", counts)
    counts = {}
    for name in ("plain", "watched"):
        counter = _Counter(machine)
        with machine.within_memory(f"{name} Trainer"):
            trained(machine, "full", counter, FIRST + STEPS, watched=name == "watched")
        counts[name] = counter.counts
    return [*rows, *_rows("Trainer", counts)]


def _rows(host: str, counts: dict[str, list[Counter[str]]]) -> list[Row]:
    rows: list[Row] = []
    for what in WAITS:
        of = {name: [step[what] for step in steps] for name, steps in counts.items()}
        usual = {name: median(found) for name, found in of.items()}
        rows.append({"host": host, "what": what, **usual, "most": max(of["watched"])})
    return rows


class _Counter(TrainerCallback):
    """Counts the waits of each of a trainer's last ``STEPS`` steps."""

    def __init__(self, machine: Machine) -> None:
        self.counts: list[Counter[str]] = []
        self._machine, self._profiler = machine, None

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= FIRST:
            self._machine.synchronise()
            self._profiler = profile(activities=_activities(self._machine))
            self._profiler.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self.counts.append(_waits(self._profiler))
            self._profiler = None


def _counted(step: Callable[[], None], machine: Machine) -> list[Counter[str]]:
    """Return how many waits of each kind each of ``STEPS`` steps had."""
    counts: list[Counter[str]] = []
    for _ in range(STEPS):
        machine.synchronise()
        with profile(activities=_activities(machine)) as profiler:
            step()
        counts.append(_waits(profiler))
    return counts


def _activities(machine: Machine) -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if machine.has_cuda else []
    return [ProfilerActivity.CPU, *cuda]


def _waits(profiler: profile) -> Counter[str]:
    names = [event.name for event in profiler.events() or ()]
    return Counter(
        what for name in names for what, starts in WAITS.items() if name.startswith(starts)
    )
