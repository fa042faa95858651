"""How often the host waits for the device in a step, watched and not, by torch's profiler."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable

from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import nanstop
from gpu import models
from gpu.machine import Machine, Row

STEPS = 4
FIRST = 20
"""Watched steps before those that are counted: of these none is one that is looked at more closely
(2^n, and the one after it).
"""
WAITS = {
    "reads of a number": ("aten::_local_scalar_dense",),
    "copies to the host": ("Memcpy DtoH",),
    "waits for a stream": ("cudaStreamSynchronize",),
    "waits for the device": ("cudaDeviceSynchronize",),
    "waits for an event": ("cudaEventSynchronize", "cudaStreamWaitEvent"),
}


def run(machine: Machine) -> list[Row]:
    """Return a row for each kind of wait: how many a step, plain and watched."""
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
    return [
        {"what": what} | {name: found[what] / STEPS for name, found in counts.items()}
        for what in WAITS
    ]


def _counted(step: Callable[[], None], machine: Machine) -> Counter[str]:
    activities = [ProfilerActivity.CPU]
    if machine.has_cuda:
        activities.append(ProfilerActivity.CUDA)
    machine.synchronise()
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
    machine.synchronise()
    counts: Counter[str] = Counter()
    for event in profiler.events() or ():
        for what, starts in WAITS.items():
            counts[what] += event.name.startswith(starts)
    return counts
