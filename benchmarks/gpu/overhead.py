"""Step time and peak memory, watched and not: blocks of steps of one training, taking turns.

The model is one, so that it fits; what differs between the two of a pair is who looks. Beside
nanstop: the other ways to look for NaN.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.debug_utils import DebugUnderflowOverflow

import nanstop
from gpu import models
from gpu.machine import Machine, Row

CASES = (
    ("0.5B", "full", False, 6),
    ("1.5B", "full", True, 4),
    ("7B", "LoRA", True, 1),
    ("7B", "full", True, 1),
    ("1.5B", "full", False, 4),
    ("7B", "4-bit LoRA", True, 1),
    ("0.5B", "LoRA", True, 6),
    ("1.5B", "LoRA", True, 4),
    ("7B", "LoRA", False, 1),
    ("0.5B", "4-bit LoRA", True, 6),
    ("1.5B", "4-bit LoRA", True, 4),
    ("0.5B", "full", True, 6),
    ("0.5B", "LoRA", False, 6),
    ("1.5B", "LoRA", False, 4),
)
"""Size, what trains, whether with checkpointing, and rows of a batch, so many that a step takes as
long as the device computes, not as its host takes to launch that: the usual ones first.
"""
Way = tuple[Callable[[], None], Callable[[], AbstractContextManager[Any]]]
"""A step, and what is put around such steps."""
WARM_UP = 12
"""Watched steps that come first: a run is looked at more closely in its first ones."""
STEPS = 3
"""Steps of a block, timed together: what a wait within a step costs shows at the next one."""
SECONDS, FEWEST, MOST = 25.0, 8, 60
"""How long the pairs of a case may take, and how many there are at least and at most."""
BESIDE_PAIRS = 3
"""Pairs for each other way to look: these cost so much that more would show nothing."""


@dataclass
class Block:
    """What the blocks of one way to look have shown: milliseconds a step, peak bytes."""

    milliseconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def run(machine: Machine) -> Iterator[Row]:
    """Return a row for each size, way to train and way to look."""
    toys = (("toy", how, again, 2) for size, how, again, _ in CASES if size == "7B")
    for size, how, checkpointing, num_rows in toys if machine.toy else CASES:
        what = f"{size}, {how}, checkpointing {'on' if checkpointing else 'off'}"
        if how.startswith("4-bit") and not _can_quantise(machine):
            continue
        if machine.goes_on(what):
            rows: list[Row] = []
            with machine.within_memory(what):
                rows = _measured(machine, size, how, num_rows, checkpointing=checkpointing)
            yield from rows


def _can_quantise(machine: Machine) -> bool:
    if not machine.has_cuda:
        machine.lack("4-bit: needs a GPU")
    return machine.has_cuda and machine.has("bitsandbytes", "4-bit")


def _measured(
    machine: Machine, size: str, how: str, num_rows: int, *, checkpointing: bool
) -> list[Row]:
    model = models.qwen2(size, machine)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    trained = models.made_trainable(model, how, machine).train()
    optimizer = models.optimizer_of(trained, machine)
    given = models.batch(model, machine, num_rows, 16 if machine.toy else 2048)
    with (
        tempfile.TemporaryDirectory() as out,
        nanstop.watch(trained, optimizer, out=out) as watch,
    ):
        against_it = _interleaved(
            machine,
            trained,
            optimizer,
            watch,
            given,
            beside=size in ("1.5B", "toy") and not checkpointing,
        )
        assert watch.incidents == ()
    return [
        {
            "size": size,
            "trains": how,
            "checkpointing": checkpointing,
            "rows": num_rows,
            "looks": name,
        }
        | against(plain, other)
        for name, (plain, other) in against_it.items()
    ]


def _interleaved(
    machine: Machine,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    watch: Any,
    given: dict[str, Tensor],
    *,
    beside: bool,
) -> dict[str, tuple[Block, Block]]:
    """Return, by name, plain blocks and those that are looked at; ``beside`` nanstop the other ways
    to look.
    """

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

    others: dict[str, Way] = {
        "isfinite hooks": (plain, lambda: _isfinite_hooks(model)),
        "DebugUnderflowOverflow": (plain, lambda: _debugged(model)),
        "detect_anomaly": (plain, lambda: torch.autograd.detect_anomaly(check_nan=True)),
    }
    for _ in range(2 if machine.toy else WARM_UP):
        watched()
    pairs = 2
    if not machine.toy:
        took = min(machine.milliseconds(plain) for _ in range(3))
        pairs = min(MOST, max(FEWEST, round(1e3 * SECONDS / (2 * STEPS * took))))
    found = {"nanstop": _pairs(machine, plain, (watched, nullcontext), pairs)}
    for name, way in others.items() if beside else ():
        found[name] = _pairs(machine, plain, way, min(pairs, BESIDE_PAIRS))
    return found


def _pairs(
    machine: Machine, plain: Callable[[], None], way: Way, pairs: int
) -> tuple[Block, Block]:
    """Return blocks of either kind in turns, each of a pair first as often as second."""
    blocks = Block(), Block()
    step, around = way
    for pair in range(pairs):
        for block in blocks if pair % 2 else blocks[::-1]:
            if block is blocks[0]:
                _timed(machine, block, plain)
                continue
            with around():
                _timed(machine, block, step)
    return blocks


def _timed(machine: Machine, block: Block, step: Callable[[], None]) -> None:
    if machine.has_cuda:
        torch.cuda.reset_peak_memory_stats()
    block.milliseconds.append(machine.milliseconds(lambda: [step() for _ in range(STEPS)]) / STEPS)
    if machine.has_cuda:
        block.peaks.append(torch.cuda.max_memory_allocated())


def against(plain: Block, other: Block) -> Row:
    """Return the ratio of times (median over pairs, its 95 % bootstrap interval, and that of all
    the time together, in which the few steps that are looked at closely count) and of peaks.
    """
    pairs = list(zip(plain.milliseconds, other.milliseconds, strict=True))
    ratios = [mine / theirs for theirs, mine in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    peaks = max(other.peaks) / max(plain.peaks) if other.peaks else None
    return {
        "pairs": len(pairs),
        "plain ms": round(statistics.median(plain.milliseconds), 3),
        "ratio": round(statistics.median(ratios), 4),
        "low": round(medians[50], 4),
        "high": round(medians[1949], 4),
        "all": round(sum(other.milliseconds) / sum(plain.milliseconds), 4),
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
