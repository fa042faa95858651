"""Step time and peak memory, watched and not: blocks of steps of one training, taking turns.

The model is one, so that it fits; what differs between two blocks is who looks. Beside nanstop: the
other ways to look for NaN.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers.debug_utils import DebugUnderflowOverflow

import nanstop
from gpu import models
from gpu.machine import Machine, Row

SIZES = ("0.5B", "1.5B", "7B")
WAYS = (
    ("full", False),
    ("LoRA", True),
    ("4-bit LoRA", True),
    ("full", True),
    ("LoRA", False),
    ("4-bit LoRA", False),
)
"""Ways to train and whether with checkpointing, the usual ones first: each at all sizes."""
Way = tuple[Callable[[], None], Callable[[], AbstractContextManager[Any]]]
"""A step, and what is put around a block of such steps."""
WARM_UP = 10
"""Watched steps that come first: a run is looked at more closely in its first ones."""
PAIRS, BLOCK_SECONDS, MOST_STEPS = 8, 0.35, 10
"""Blocks of each way, how long one of them takes at least, and steps of a block at the most."""
BESIDE_PAIRS = 2
"""Blocks of the other ways to look, which cost so much that more would show nothing."""


@dataclass
class Block:
    """What the blocks of one way to look have shown: milliseconds a step, peak bytes."""

    milliseconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def run(machine: Machine) -> Iterator[Row]:
    """Return a row for each size, way to train and way to look."""
    for (how, checkpointing), size in product(WAYS, ("toy",) if machine.toy else SIZES):
        what = f"{size}, {how}, checkpointing {'on' if checkpointing else 'off'}"
        if how.startswith("4-bit") and not _can_quantise(machine):
            continue
        if machine.goes_on(what):
            rows: list[Row] = []
            with machine.within_memory(what):
                rows = _measured(machine, size, how, checkpointing=checkpointing)
            yield from rows


def _can_quantise(machine: Machine) -> bool:
    if not machine.has_cuda:
        machine.lack("4-bit: needs a GPU")
    return machine.has_cuda and machine.has("bitsandbytes", "4-bit")


def _measured(machine: Machine, size: str, how: str, *, checkpointing: bool) -> list[Row]:
    model = models.qwen2(size, machine)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    trained = models.made_trainable(model, how, machine).train()
    optimizer = models.optimizer_of(trained, machine)
    given = (
        models.batch(model, machine, 2, 16)
        if machine.toy
        else models.batch(model, machine, 1 if size == "7B" else 2, 2048)
    )
    with (
        tempfile.TemporaryDirectory() as out,
        nanstop.watch(trained, optimizer, out=out) as watch,
    ):
        blocks = _interleaved(machine, trained, optimizer, watch, given, beside=not checkpointing)
        assert watch.incidents == ()
    plain = blocks.pop("plain")
    return [
        {"size": size, "trains": how, "checkpointing": checkpointing, "looks": name}
        | against(plain, block)
        for name, block in blocks.items()
    ]


def _interleaved(
    machine: Machine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    watch: Any,
    given: dict[str, Tensor],
    *,
    beside: bool,
) -> dict[str, Block]:
    """Return the blocks of plain and watched training, ``beside`` them those of the others."""

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss

    def plain() -> None:
        loss(given).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def watched() -> None:
        watch.step(loss, given)
        watch.update(clip=1.0)

    ways: dict[str, Way] = {"plain": (plain, nullcontext), "nanstop": (watched, nullcontext)}
    others: dict[str, Way] = {
        "isfinite hooks": (plain, lambda: _isfinite_hooks(model)),
        "DebugUnderflowOverflow": (plain, lambda: _debugged(model)),
        "detect_anomaly": (plain, lambda: torch.autograd.detect_anomaly(check_nan=True)),
    }
    for _ in range(2 if machine.toy else WARM_UP):
        watched()
    steps = 2
    if not machine.toy:
        took = min(machine.milliseconds(plain) for _ in range(3))
        steps = max(2, min(MOST_STEPS, round(1e3 * BLOCK_SECONDS / took)))
    blocks = {name: Block() for name in (*ways, *(others if beside else ()))}
    for pair in range(2 if machine.toy else PAIRS):
        taken = ways | others if beside and pair < BESIDE_PAIRS else ways
        for name in list(taken) if pair % 2 else list(taken)[::-1]:
            _block(machine, blocks[name], taken[name], steps if name in ways else 2)
    return blocks


def _block(machine: Machine, block: Block, way: Way, steps: int) -> None:
    step, around = way
    with around():
        step()
        if machine.has_cuda:
            torch.cuda.reset_peak_memory_stats()
        spent = machine.milliseconds(lambda: [step() for _ in range(steps)])
    block.milliseconds.append(spent / steps)
    if machine.has_cuda:
        block.peaks.append(torch.cuda.max_memory_allocated())


def against(plain: Block, other: Block) -> Row:
    """Return the time ratio (geometric mean, 95 % bootstrap interval over pairs) and the ratio of
    peaks.
    """
    pairs = zip(plain.milliseconds, other.milliseconds, strict=False)  # others have fewer
    logs = [math.log(mine / theirs) for theirs, mine in pairs]
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(logs, k=len(logs))) for _ in range(2000))
    low, high = math.exp(means[50]), math.exp(means[1949])
    peaks = max(other.peaks) / max(plain.peaks) if other.peaks else None
    return {
        "plain ms": round(statistics.median(plain.milliseconds), 3),
        "ratio": round(math.exp(statistics.fmean(logs)), 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "memory": round(peaks, 4) if peaks is not None else None,
    }


@contextmanager
def _isfinite_hooks(model: nn.Module) -> Iterator[None]:
    def check(module: nn.Module, _: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
            raise FloatingPointError(type(module).__name__)

    handles = [module.register_forward_hook(check) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _debugged(model: nn.Module) -> Iterator[None]:
    hooks = {module: dict(module._forward_hooks) for module in model.modules()}
    DebugUnderflowOverflow(model)
    try:
        yield
    finally:  # it has no way to be taken off
        for module, before in hooks.items():
            module._forward_hooks.clear()
            module._forward_hooks.update(before)
