"""What a run under a plan holds in a narrow format, and how large that is in float32.

A recorded run says which operation emits which format; sizes come from a float32 run of the same
micro-batch (``measure.ranges.SizeLook``), because what overflows is saturated, and all that follows
it spoiled, in the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from nanstop.measure.ranges import SizeLook, keyed
from nanstop.records import FORMAT_MAX, Phase, op_name
from nanstop.replay.conditions import Under
from nanstop.replay.step import Step
from nanstop.tracing import operators
from nanstop.tracing.record_step import Recording, record
from nanstop.tracing.recorder import UNMEASURED, Op, Value

Key = tuple[int, Phase, str, str, int]

_MOVES = operators.CASTS | {"clone", "contiguous", "view_copy"}
_PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm", "convolution"}
)


@dataclass(frozen=True, slots=True)
class Narrow:
    """A value that the module ``module`` holds in the narrow format.

    Its largest size in float32, loss not scaled.

    ``made_of``: (module, size) of the narrow values that the operation read.
    """

    backward: bool
    module: str
    op: str
    absmax: float
    made_of: tuple[tuple[str, float], ...] = ()


def measured(
    step: Step, micro: int, *, under: Under, sizes: dict[Key, tuple[float, ...]]
) -> Recording:
    """Return a recorded run.

    ``sizes`` takes in the largest finite size of each output of each op.
    """
    look = SizeLook(step, micro)
    run = record(step, micro, under=under, look=look, keep_grads=True)
    sizes.update(look.sizes(run.trace))
    return run


@dataclass(slots=True)
class _Sizes:
    """Sizes of what ops wrote, in float32.

    Followed back through casts and copies to the op that made the number.
    """

    run: Recording
    wide: Mapping[Key, tuple[float, ...]]
    dtype: torch.dtype
    keys: dict[int, Key] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = {op.index: key for key, op in keyed(self.run.trace, self.run.micro)}

    def of(self, op: Op) -> float | None:
        """Return the size of an op's output.

        None where it was not measured: masks, numbers of the program's own.
        """
        seen = 0
        while op_name(op.name) in _MOVES and op.inputs and seen < len(self.keys):
            writer = self.writer(op.inputs[-1])
            if writer is None:
                return self._given(op.inputs[-1])
            op, seen = writer, seen + 1
        return _no_mask(self._largest(op, self.wide.get(self.keys[op.index], ())))

    def _largest(self, op: Op, sizes: tuple[float, ...]) -> float | None:
        """Return the largest size of the outputs in the format.

        Kernels return statistics in float32 beside them.
        """
        narrow = [value.dtype is self.dtype for value in op.outputs]
        if any(narrow) and len(narrow) == len(sizes):
            sizes = tuple(size for size, mine in zip(sizes, narrow, strict=True) if mine)
        return max(sizes, default=None)

    def writer(self, value: Value) -> Op | None:
        """Return the op that wrote a value last, None for a parameter or an entry of the batch."""
        before = value.storage.writers[: value.generation]
        return self.run.trace.ops[before[-1]] if before else None

    def _given(self, value: Value) -> float | None:
        if value.slot == UNMEASURED:
            return None
        low, high = self.run.trace.low[value.slot], self.run.trace.high[value.slot]
        size = max(abs(low), abs(high))
        return _no_mask(size) if math.isfinite(size) else None


def _no_mask(size: float | None) -> float | None:
    """Return a size unless it is a format's largest number to the bit.

    Programs write that, and compute it never.
    """
    return None if size in FORMAT_MAX.values() else size


def narrow_values(
    run: Recording, wide: Mapping[Key, tuple[float, ...]], dtype: torch.dtype
) -> tuple[Narrow, ...]:
    """Return every value that an operation computed in ``dtype``, or cast to it, in a recorded run.

    What only moves a value that was in the format already is left out.
    """
    sizes = _Sizes(run, wide, dtype)
    found: list[Narrow] = []
    for op in run.trace.ops:
        if not any(value.dtype is dtype for value in op.outputs):
            continue
        moves = op_name(op.name) in _MOVES
        if moves and any(value.dtype is dtype for value in op.inputs):
            continue
        size = sizes.of(op)
        if size is not None:
            read = tuple(_operands(op, sizes, dtype))
            found.append(Narrow(op.phase == "backward", op.module, op.name, size, read))
    return tuple(found)


def _operands(op: Op, sizes: _Sizes, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    for value in op.inputs:
        writer = sizes.writer(value) if value.dtype is dtype else None
        size = sizes.of(writer) if writer is not None else None
        if writer is not None and size is not None:
            yield writer.module, size


def births(run: Recording) -> tuple[str, ...]:
    """Return the modules of operations that read finite numbers and wrote others, in the order
    of the run.
    """
    finite = [
        math.isfinite(low) and math.isfinite(high)
        for low, high in zip(run.trace.low, run.trace.high, strict=True)
    ]

    def good(value: Value) -> bool:
        return value.slot == UNMEASURED or finite[value.slot]

    return tuple(
        dict.fromkeys(
            op.module
            for op in run.trace.ops
            if not all(map(good, op.outputs)) and all(map(good, op.inputs))
        )
    )


def num_casts(run: Recording) -> int:
    """Return how often a floating value was converted to another format."""
    return sum(
        op_name(op.name) in operators.CASTS
        and any(v.dtype.is_floating_point for v in op.inputs)
        and {v.dtype for v in op.inputs} != {v.dtype for v in op.outputs}
        for op in run.trace.ops
    )


def bytes_written(run: Recording) -> int:
    """Return the bytes of all that operations wrote."""
    return sum(
        math.prod(value.shape) * value.dtype.itemsize
        for op in run.trace.ops
        for value in op.outputs
    )


def product_work(run: Recording, dtype: torch.dtype) -> dict[str, tuple[int, int]]:
    """Return, by module, the multiplications of its matrix products.

    Those done in ``dtype``, and all.
    """
    found: dict[str, tuple[int, int]] = {}
    for op in run.trace.ops:
        if op_name(op.name) not in _PRODUCTS or not op.inputs:
            continue
        depth = math.prod(op.inputs[-1].shape[-2:-1])
        work = depth * sum(math.prod(value.shape) for value in op.outputs)
        narrow = any(value.dtype is dtype for value in op.outputs)
        before = found.get(op.module, (0, 0))
        found[op.module] = before[0] + work * narrow, before[1] + work
    return found
