"""Where the digits go: operations whose result is far from float32 although what they read was
not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from nanstop.measure.ranges import keyed
from nanstop.numerics.tensors import floats, format_name, in_float64
from nanstop.records import DriftRow, op_name
from nanstop.replay.conditions import Under
from nanstop.replay.step import Step
from nanstop.tracing import operators
from nanstop.tracing.record_step import record
from nanstop.tracing.recorder import Op

LEAST = 0.02
"""Relative distance from which a result counts as lost."""
FACTOR = 8.0
"""How much farther than its operands, or than one rounding, a result must be."""
_NUM_SAMPLES = 4096
_MASK = 1e30
_MOST_ROWS = 8

OpSamples = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def drift_rows(
    step: Step, *, under: Under, micros: Iterable[int] | None = None
) -> tuple[DriftRow, ...]:
    """Return the forward ops that lose digits, in the order in which they run, at most eight.

    The same op is compared in the run's own formats and ``under`` a wide one, on up to 4096
    elements of each operand and result. Undone bitwise. Synchronises the device at the end of each
    run.
    """
    rows: dict[tuple[str, str], DriftRow] = {}
    for micro in range(len(step.batches)) if micros is None else micros:
        own, wide = _sampled(step, micro, nullcontext), _sampled(step, micro, under)
        for key, (op, samples) in own.items():
            if key in wide and _computes(op):
                row = _compared(op, samples, wide[key][1])
                known = rows.get((op.module, op.name))
                if row is not None and (known is None or row.after > known.after):
                    rows[row.module, row.op] = row
    return tuple(rows.values())[:_MOST_ROWS]


def _computes(op: Op) -> bool:
    cast = op_name(op.name) in operators.CASTS  # a wide run has fewer of them
    return bool(op.outputs) and not cast and op.phase in ("forward", "loss")


def _sampled(step: Step, micro: int, under: Under) -> dict[Any, tuple[Op, OpSamples]]:
    look = _Look()
    trace = record(step, micro, under=under, look=look).whole_trace()
    return {
        key: (op, look.seen[op.index]) for key, op in keyed(trace, micro) if op.index in look.seen
    }


class _Look:
    """Called with each op before it runs and then with its result; keeps samples of both."""

    def __init__(self) -> None:
        self.seen: dict[int, OpSamples] = {}

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None]:
        traits = operators.traits(func)
        read = [
            t for place, _, t in operators.tensors(args, kwargs) if place not in traits.overwritten
        ]
        inputs = tuple(_sample(part) for tensor in read for part in floats(tensor))

        def done(result: Any) -> None:
            if not traits.uninitialised:
                made = [t for _, t in operators.written(traits, args, kwargs, result)]
                self.seen[index] = inputs, tuple(_sample(p) for t in made for p in floats(t))

        return done


def _sample(values: Tensor) -> Tensor:
    flat = values.flatten()
    if flat.numel() <= _NUM_SAMPLES:
        return in_float64(flat)
    generator = torch.Generator().manual_seed(flat.numel())
    places = torch.randint(flat.numel(), (_NUM_SAMPLES,), generator=generator)
    return in_float64(flat[places.to(flat.device)])


def _compared(op: Op, own: OpSamples, wide: OpSamples) -> DriftRow | None:
    read, made = (_distance(a, b) for a, b in zip(own, wide, strict=True))
    dtype = op.outputs[0].dtype
    if not dtype.is_floating_point or not made >= LEAST:
        return None
    if made < FACTOR * max(read, torch.finfo(dtype).eps):
        return None
    name = format_name(dtype)
    return DriftRow(module=op.module, op=op.name, dtype=name, before=read, after=made)


def _distance(own: tuple[Tensor, ...], wide: tuple[Tensor, ...]) -> float:
    """Return the largest relative distance of tensors that are alike in size, over what is
    finite and no mask.
    """
    worst = 0.0
    for a, b in zip(own, wide, strict=False):
        if a.shape == b.shape:
            held = a.isfinite() & b.isfinite() & (b.abs() < _MASK)
            a, b = a[held], b[held]  # noqa: PLW2901
            size = float(b.norm())
            if size > 0.0:
                worst = max(worst, float((a - b).norm()) / size)
    return worst
