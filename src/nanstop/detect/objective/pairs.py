"""Whether an objective compares each output with the target of its own row, or with those of all.

Outputs [N, 1] less targets [N] are N x N differences: the missing dimension is put in front. The
loss of all pairs is finite and falls, to that of the targets' mean. That a dimension was put in
front is seen in the shapes; that the rows are lost by it, by an experiment: the micro-batch run
again, undone, with targets in another order, which leaves the loss as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.records import ObjectiveRow
from nanstop.replay.collectives import other
from nanstop.tracing.op_patches import LookOfSome, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

LEAST_ROWS = 4
MOST_TRIED = 4
ROUNDINGS, SUMMED = 2.0, 64.0
"""Of the loss, in its format and in float32, in which sums are made: by so much it may differ in
another order.
"""
FAR = 16.0
"""Times that, by which a loss differs whose targets are others."""


class Pairs(LookOfSome):
    """Keeps ops that meet every output with every target, by the op's
    index: the place of the targets among the operands, and how many rows there are.
    """

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, int]] = {}

    def __call__(
        self, index: int, _func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        first, second = args[:2]
        if not isinstance(first, Tensor) or not isinstance(second, Tensor):
            return None
        if first.requires_grad == second.requires_grad:
            return None
        mine, theirs = _moving(first, second), _moving(second, first)
        if len(mine) != 1 or len(theirs) != 1 or mine.keys() == theirs.keys():
            return None
        (rows,), (others,) = mine.values(), theirs.values()
        # A loss of torch has both filled up to one shape before it reads them.
        is_filled = 0 in first.stride() and 0 in second.stride()
        if rows == others >= LEAST_ROWS and (is_filled or first.dim() != second.dim()):
            self.found[index] = int(first.requires_grad), rows
        return None


def _moving(tensor: Tensor, beside: Tensor) -> dict[int, int]:
    """Return sizes of the dimensions along which a tensor holds more than one value, counted as in
    what it makes with another one.
    """
    ahead = max(tensor.dim(), beside.dim()) - tensor.dim()
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return {ahead + at: size for at, (size, step) in enumerate(sizes) if size > 1 and step}


def paired_rows(step: Step, pairs: Pairs) -> tuple[ObjectiveRow, ...]:
    """Return the ops that meet every output of the first micro-batch with every target, where the
    order of the targets is nothing to the loss.

    Undone bitwise; runs the micro-batch four times for each op that may be one, and not at all
    where none is. Synchronises the device.
    """
    sizes = {len(one) for one in step.batches[0].values() if isinstance(one, Tensor) and one.dim()}
    asked = [(op, at, rows) for op, (at, rows) in pairs.found.items() if rows in sizes]
    return tuple(
        _row(step, op, rows) for op, at, rows in asked[:MOST_TRIED] if _is_of_all(step, op, at)
    )


def _is_of_all(step: Step, op: int, operand: int) -> bool:
    """Return whether a loss hangs on the targets that an op reads, and not on their order."""
    changed = _Changed(op, operand, lambda rows: rows)
    plain = first_loss(step, changed)
    if changed.read is None or bool((changed.read == changed.read.flatten()[0]).all()):
        return False  # in any order they are the same
    eps, of_sums = (torch.finfo(one).eps for one in (changed.dtype, torch.float32))
    near = (ROUNDINGS * eps + SUMMED * of_sums) * abs(plain)
    turned = first_loss(step, _Changed(op, operand, _turned))
    rolled = first_loss(step, _Changed(op, operand, _rolled))
    far = abs(first_loss(step, _Changed(op, operand, other)) - plain)
    return far > FAR * near and max(abs(turned - plain), abs(rolled - plain)) <= near


def _turned(rows: Tensor) -> Tensor:
    return rows.flip(list(range(rows.dim())))


def _rolled(rows: Tensor) -> Tensor:
    dims = [at for at, size in enumerate(rows.shape) if size > 1]
    return rows.roll([1] * len(dims), dims)


class _Changed(SecondRun):
    """Has one op read another operand; ``read``: what it was to read, ``dtype``: of its result."""

    def __init__(self, index: int, operand: int, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._index, self._operand, self._change = index, operand, change
        self.read: Tensor | None = None
        self.dtype = torch.float32

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index == self._index:
            at = self._operand
            self.read = args[at].detach().clone()
            args = (*args[:at], self._change(args[at]), *args[at + 1 :])
        result = func(*args, **kwargs)
        if index == self._index and result.is_floating_point():
            self.dtype = result.dtype
        return result


def _row(step: Step, index: int, rows: int) -> ObjectiveRow:
    op = first_ops(step)[index]
    return ObjectiveRow(
        op=op.name, module=op.module, given="every_pair", width=rows, line=line_text(op.line)
    )
