"""Which samples and tokens an op's bad elements belong to:
said only where its axes are those of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanstop.localize.slicing import range_of, reaching
from nanstop.records import Position, op_name
from nanstop.records.values import origin_of
from nanstop.tracing.op_details import OpDetails
from nanstop.tracing.recorder import Op, Trace, Value

_OF_ONE = re.compile(r"^batch\[.*\.(\d+)\.[^.]+\]$")
"""An entry of a dict in a list of the batch: ``batch[targets.2.boxes]``."""


class Grid:
    """The micro-batch's [rows, tokens], and the sizes of the model that could be mistaken for
    them.
    """

    def __init__(self, shape: tuple[int, int], root: nn.Module) -> None:
        self.rows, self.tokens = shape
        shapes = {tuple(p.shape) for p in root.parameters()}
        self._sizes = {size for shape in shapes for size in shape}
        self._weights = {tuple(sorted(shape)) for shape in shapes}

    def fold(self, mask: Tensor) -> Tensor | None:
        """Return [rows, tokens], True where any element is;
        None unless the axes are surely those of the batch.

        Understood: [rows, tokens, ...] and [rows, heads, tokens, ...]. A shape that is also a
        weight's (its gradient), or whose sizes coincide so that two readings are possible, is not.
        """
        shape = tuple(mask.shape)
        if self.rows == self.tokens or tuple(sorted(shape)) in self._weights:
            return None
        token_axes = [axis for axis in (1, 2) if shape[axis : axis + 1] == (self.tokens,)]
        if shape[:1] != (self.rows,) or not token_axes:
            return None
        axis = token_axes[0]
        if len(shape) == 4 and len(token_axes) == 2:
            return None
        if axis == 2 and len(shape) != 4:
            return None
        if self.tokens in self._sizes and not self._features_last(shape[axis + 1 :]):
            return None
        return mask.movedim(axis, 1).reshape(self.rows, self.tokens, -1).any(-1)

    def _features_last(self, rest: tuple[int, ...]) -> bool:
        """Return whether what follows the token axis is another size of the model, so that the
        axis is not itself one.
        """
        return bool(rest) and rest[-1] in self._sizes and rest[-1] != self.tokens


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """``rows``: how many there are. ``masks``: entries of the batch that hold 0 and 1 alone.
    ``data``: those that are known to be rows of data, none where that is not known.
    """

    grid: Grid | None = None
    rows: int | None = None
    masks: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()

    def is_beside(self, value: Value) -> bool:
        """Return whether a tensor is no part of the batch: it has not a row for each sample, or is
        none of what is known to be its data.
        """
        if origin_of(value.storage.name) != "from_batch":
            return True
        if self.data and value.storage.name not in self.data:
            return True
        return self.rows is not None and value.shape[:1] != (self.rows,)


def positions_of(mask: Tensor, grid: Grid) -> tuple[Position, ...] | None:
    """Return samples and their token spans of the True elements, or None where the axes are not
    those of the batch.
    """
    folded = grid.fold(mask)
    if folded is None:
        return None
    found = []
    for row in folded.any(-1).nonzero().flatten().tolist():
        where = folded[row].nonzero().flatten()
        found.append(
            Position(sample=row, first_token=int(where.min()), last_token=int(where.max()))
        )
    return tuple(found)


def positions_that_fail(
    trace: Trace,
    birth: int,
    nans: Sequence[int],
    looked: Mapping[int, OpDetails],
    grid: Grid,
) -> tuple[Position, ...] | None:
    """Return the positions of an op's bad elements; None also where it has such in each sample and
    what becomes NaN of them, at the ops ``nans``, has not: which samples fail has to be tried then.

    A mask that leaves its format is -inf in every padded row, and NaN where a row is nothing else;
    so is what takes the largest of a row from it. ``looked``: at which ops.
    """

    def at(index: int) -> tuple[Position, ...] | None:
        seen = looked.get(index)
        return positions_in(trace, trace.ops[index], seen.bad, grid) if seen is not None else None

    found, ends = at(birth), [at(index) for index in nans]
    if found is None or len(_samples(found)) < grid.rows:
        return found
    if birth in nans:
        both = (one.nan and (one.posinf or one.neginf) for one in looked[birth].outputs)
        return None if any(both) else found
    if None in ends:
        return found
    failing = {sample for end in ends if end for sample in _samples(end)}
    return None if 0 < len(failing) < grid.rows else found


def positions_in_turn(trace: Trace, op: Op, rows: int | None) -> tuple[Position, ...] | None:
    """Return the samples of which an op is bad, where a line is run for one after the other: each
    time what it reads of the batch comes of one dict in a list of as many as there are ``rows``, as
    the targets of a detector are. None of any other line.
    """
    calls = [one for one in trace.ops if one.place == op.place]
    if rows is None or not 2 <= rows <= len(calls):
        return None
    samples = [_only_sample(trace, one, rows) for one in calls]
    if set(samples) != set(range(rows)):
        return None
    pairs = zip(samples, calls, strict=True)
    bad = {sample for sample, one in pairs if sample is not None and _is_bad(trace, one)}
    return tuple(Position(sample=sample) for sample in sorted(bad)) or None


def _is_bad(trace: Trace, op: Op) -> bool:
    return any(range_of(trace, one).is_bad for one in op.outputs if one.slot >= 0)


def _only_sample(trace: Trace, op: Op, rows: int) -> int | None:
    before = (trace.ops[index] for index in reaching(trace, op.inputs))
    read = (value for one in (*before, op) for value in one.inputs)
    found = {
        int(place[1])
        for value in read
        if (place := _OF_ONE.search(value.storage.name or "")) and value.shape[:1] != (rows,)
    }
    return found.pop() if len(found) == 1 else None


def _samples(positions: Iterable[Position]) -> set[int]:
    return {position.sample for position in positions}


def positions_in(
    trace: Trace, op: Op, bad: Iterable[Tensor | None], grid: Grid
) -> tuple[Position, ...] | None:
    """Return the positions of an op's bad elements, by its own shape or by a shape in which the
    value is read later.

    Attention and linear layers flatten the batch: [rows * heads, tokens, tokens] is read as [rows,
    heads, tokens, tokens] afterwards, over the same memory. The rows of a matrix product are those
    of its first operand, which was [rows, tokens, ...] before.
    """
    for output, mask in zip(op.outputs, bad, strict=False):
        if mask is None or tuple(mask.shape) != output.shape:
            continue
        own = positions_of(mask, grid)
        if own is not None:
            return own
        found = _positions_seen(mask, output, trace.ops[op.index + 1 :], grid)
        operand = _left_factor(op)
        if found is None and operand is not None:
            across = mask.any(-1, keepdim=True).expand(operand.shape)
            found = _positions_seen(across, operand, trace.ops[: op.index], grid)
        if found is not None:
            return found
    return None


def _left_factor(op: Op) -> Value | None:
    """Return the matrix whose rows an op's rows are:
    of a product, where they lie one after the other in memory.
    """
    if op_name(op.name) not in ("mm", "addmm"):
        return None
    first = next((value for value in op.inputs if len(value.shape) == 2), None)
    if first is None or first.layout[0] != (first.shape[1], 1):
        return None
    return first if origin_of(first.storage.name) in ("unknown", "from_batch") else None


def _positions_seen(
    mask: Tensor, value: Value, ops: Iterable[Op], grid: Grid
) -> tuple[Position, ...] | None:
    for seen in _readings(value, ops):
        found = positions_of(_seen_as(mask, value, seen), grid)
        if found is not None:
            return found
    return None


def _readings(whole: Value, ops: Iterable[Op]) -> Iterator[Value]:
    """Yield how ops read or wrote the whole of a value: other shapes over the same memory."""
    tried = {(whole.shape, whole.layout)}
    for op in ops:
        for value in (*op.inputs, *op.outputs):
            if value.storage is not whole.storage or value.dtype is not whole.dtype:
                continue
            key = (value.shape, value.layout)
            if key not in tried and _numel(value) == _numel(whole):
                tried.add(key)
                yield value


def _numel(value: Value) -> int:
    return torch.Size(value.shape).numel()


def _seen_as(mask: Tensor, written: Value, read: Value) -> Tensor:
    reach = 1 + max(_last(written), _last(read))
    memory = torch.zeros(reach, dtype=torch.bool, device=mask.device)
    memory.as_strided(written.shape, *written.layout).copy_(mask)
    return memory.as_strided(read.shape, *read.layout)


def _last(value: Value) -> int:
    strides, offset = value.layout
    return offset + sum(
        (size - 1) * stride for size, stride in zip(value.shape, strides, strict=True)
    )
