"""Positions and angles that a format is too coarse for:
numbers that come out equal, angles that are off by a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import HALF, format_name, in_float64
from nanstop.records import CoarseRow, op_name
from nanstop.replay.step import Step
from nanstop.tracing import operators
from nanstop.tracing.op_patches import LookOfSome
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import record
from nanstop.tracing.recorder import Op, Trace, Value

LEAST_ANGLE = 0.05
"""Radians from which an error of an angle is told."""
_ANGLES = frozenset({"sin", "cos", "sin_", "cos_"})
_WRITE_COUNTS = frozenset({"arange", "copy_", "cumsum"}) | operators.CASTS
_REACH = 8
"""How many ops before a sine its angle is followed back."""


def coarse_rows(step: Step, *, micros: Iterable[int] | None = None) -> tuple[CoarseRow, ...]:
    """Return the ops of a window, run as it is, that lose track of what they count or turn by.
    Undone bitwise.

    Whole numbers (cast, counted or summed up in half precision) where two different ones come out
    equal; sines and cosines of angles that half an ulp of their format, or of the half format they
    come from, turns by ``LEAST_ANGLE`` or more. Synchronises the device.
    """
    found: dict[tuple[str, str, str], CoarseRow] = {}
    for micro in range(len(step.batches)) if micros is None else micros:
        look = _Counts()
        trace = record(step, micro, look=look).whole_trace()
        for op in trace.ops:
            if op.phase in ("forward", "loss"):
                row = _count_row(op, look) or _angle_row(op, trace, look.exact)
                if row is not None:
                    known = found.get((row.module, row.op, row.dtype))
                    worse = known is None or row.error > known.error
                    found[row.module, row.op, row.dtype] = row if worse or known is None else known
    return tuple(sorted(found.values(), key=lambda row: -row.error))


class WholeNumbersInHalf(LookOfSome):
    """Notes whether any op writes whole numbers in half precision."""

    ops, in_backward = _WRITE_COUNTS, None

    def __init__(self) -> None:
        self.are_there = False

    def __call__(
        self, _index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if self.are_there:
            return None
        base = operators.traits(func).base

        def done(result: Any) -> None:
            is_half = isinstance(result, Tensor) and result.dtype in HALF
            self.are_there |= is_half and _exact(base, args) is not None

        return done


class _Counts:
    """Called with each op; of those that write whole numbers in half precision, keeps (largest,
    error).

    ``exact``: those that wrote every number as it is.
    """

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, float]] = {}
        self.exact: set[int] = set()

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        exact = _exact(operators.traits(func).base, args)
        if exact is None:
            return None

        def done(result: Any) -> None:
            if not isinstance(result, Tensor) or result.dtype not in HALF:
                return
            if result.numel() != exact.numel():
                return
            kept = in_float64(result).flatten()
            meant = exact.to(kept.device).flatten()
            if torch.equal(kept, meant):
                self.exact.add(index)
            elif kept.unique().numel() < exact.unique().numel():
                off = (kept - meant).abs().nan_to_num(posinf=float(exact.abs().max()))
                self.seen[index] = (float(exact.abs().max()), float(off.max()))

        return done


def _exact(base: str, args: Any) -> Tensor | None:
    """Return the whole numbers, in float64, that an op is about to write;
    None if it writes no such thing.
    """
    if base == "arange":
        return torch.arange(*args[:3], dtype=torch.float64, device="cpu")
    source = args[0] if args and isinstance(args[0], Tensor) else None
    if base == "copy_" and len(args) > 1:
        source = args[1] if isinstance(args[1], Tensor) else None
    if source is None:
        return None
    if base in operators.CASTS:
        whole = not source.is_floating_point() and not source.is_complex()
        return in_float64(source) if whole and source.dtype is not torch.bool else None
    if base == "cumsum" and source.dtype in (*HALF, torch.bool):
        wide = in_float64(source)
        return wide.cumsum(args[1]) if bool((wide == wide.round()).all()) else None
    return None


def _count_row(op: Op, look: _Counts) -> CoarseRow | None:
    if op.index not in look.seen or not op.outputs:
        return None
    absmax, error = look.seen[op.index]
    dtype = format_name(op.outputs[0].dtype)
    line = line_text(op.line)
    return CoarseRow(
        module=op.module, op=op.name, dtype=dtype, absmax=absmax, error=error, line=line
    )


def _angle_row(op: Op, trace: Trace, exact: Set[int]) -> CoarseRow | None:
    if op_name(op.name) not in _ANGLES or not op.inputs:
        return None
    angle = op.inputs[0]
    half = _coarsest(angle, trace, exact, _REACH)
    if half is None or angle.slot < 0:
        return None
    absmax = max(abs(trace.low[angle.slot]), abs(trace.high[angle.slot]))
    error = absmax * torch.finfo(half).eps / 2
    if not error >= LEAST_ANGLE:  # a NaN is no angle
        return None
    return CoarseRow(
        module=op.module,
        op=op.name,
        dtype=format_name(half),
        absmax=absmax,
        error=error,
        line=line_text(op.line),
    )


def _coarsest(value: Value, trace: Trace, exact: Set[int], reach: int) -> torch.dtype | None:
    """Return the half format that a value is in or was computed from, within ``reach`` ops;
    exact numbers have none.
    """
    writers = value.storage.writers[: value.generation]
    if writers and writers[-1] in exact:
        return None
    if value.dtype in HALF:
        return value.dtype
    if not writers or reach == 0 or not value.dtype.is_floating_point:
        return None
    sources = trace.ops[writers[-1]].inputs
    found = (_coarsest(source, trace, exact, reach - 1) for source in sources)
    return next((half for half in found if half is not None), None)
