"""float16 under a precision plan: a Gemma3 in which one projection leaves float16's range.

Plain float16, float16 with the plan that nanstop finds, bfloat16, and float32 with and without
TF32: time of a step, and the loss of the same steps.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import nanstop
from gpu import models
from gpu.machine import Machine, Row

LOUD = 300_000.0
"""What the weights of one projection are multiplied by: its output leaves float16, not bfloat16."""


@dataclass(frozen=True, slots=True)
class Way:
    """``dtype``: what autocast computes in, None for no autocast. ``is_trained``: whether all steps
    are made and their loss is told; a few tell their time.
    """

    name: str
    dtype: str | None
    tf32: bool = True
    with_plan: bool = False
    is_trained: bool = False


WAYS = (
    Way("bfloat16", "bfloat16", is_trained=True),
    Way("float16 + plan", "float16", with_plan=True, is_trained=True),
    Way("float16", "float16"),
    Way("float32, TF32", None),
    Way("float32", None, tf32=False),
)
"""The slowest last: where time is short, it is the one that is left out."""
STEPS, TIMED = 200, 30
ROWS, LENGTH = 12, 1024
"""So many that a step takes as long as the device computes, not as its host takes to launch it."""


def run(machine: Machine) -> Iterator[Row]:
    """Yield a row for each format; the loss is the mean of the last tenth of the steps, and
    ``plan s`` the seconds that making the plan has taken.
    """
    size, rows, length = ("toy", 2, 16) if machine.toy else ("0.5B", ROWS, LENGTH)
    base = _planted(models.gemma3(size, machine))
    batches = [models.batch(base, machine, rows, length, seed) for seed in range(4)]
    for way in WAYS:
        if not machine.goes_on(way.name):
            return
        row: Row = {"format": way.name, "plan s": None}
        model, held = copy.deepcopy(base), nullcontext()
        if way.with_plan:
            began = time.monotonic()
            plan = nanstop.plan(model, batches, seconds=5.0 if machine.toy else 25.0)
            row["plan s"] = round(time.monotonic() - began, 1)
            if not plan.found:
                machine.lack(f"{way.name}: {plan.record.reason}")
                yield row
                continue
            held = plan.apply(model)
        with machine.within_memory(way.name):
            torch.backends.cuda.matmul.allow_tf32 = way.tf32
            steps = 4 if machine.toy else STEPS if way.is_trained else TIMED
            row |= _trained(machine, model, held, batches, way.dtype, steps)
            row |= {} if way.is_trained else {"loss": None}
        torch.backends.cuda.matmul.allow_tf32 = False
        yield row


def _planted(model: Any) -> Any:
    """Multiply the last projection of a layer; the norm that follows it undoes that, in every step
    of a training: what it makes of a vector does not depend on its length.
    """
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight.mul_(LOUD)
    return model


def _trained(
    machine: Machine,
    model: nn.Module,
    held: AbstractContextManager[Any],
    batches: list[Any],
    dtype: str | None,
    steps: int,
) -> Row:
    optimizer = models.optimizer_of(model, machine)
    scaler = torch.amp.GradScaler(machine.device, enabled=dtype == "float16")
    losses: list[Tensor] = []

    def step(number: int) -> None:
        kind = getattr(torch, dtype) if dtype else torch.float32
        with torch.autocast(machine.device, dtype=kind, enabled=dtype is not None):
            loss = model(**batches[number % len(batches)]).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())

    with held:
        milliseconds = [machine.milliseconds(partial(step, number)) for number in range(steps)]
    last = torch.stack(losses[-max(1, steps // 10) :]).float()
    return {
        "step ms": round(statistics.median(milliseconds), 3),
        "loss": float(last.mean()),
        "finite losses": int(torch.stack(losses).isfinite().sum()),
        "steps": steps,
    }
