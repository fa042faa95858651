"""Whether scores that are compared with each other are those of several rows.

A head makes [batch, length, classes], a cross entropy takes [batch, classes, length]. What is given
that shape by `view` or `reshape`, where two dimensions were to change places, holds pieces of
several rows in each row: the loss is finite, falls a little, and no row can be right. It is seen in
where numbers lie in memory, and told by an experiment: the micro-batch run again, undone, with
other scores in one row of the head changes several rows of the loss, and none of them as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.objective.operands.products import PRODUCTS
from nanstop.frozen import frozen
from nanstop.records import ObjectiveRow, op_name
from nanstop.tracing.op_patches import LookOfSome, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

_LOGS = "_log_softmax"
_COPIES = frozenset({"clone", "_to_copy", "add", "sub", "mul", "div"})


@frozen
class _Made:
    """The last product that has written somewhere: its number, and how wide its rows are."""

    index: int
    width: int
    numel: int


class MixedRows(LookOfSome):
    """Keeps of each log-softmax of trained scores, by the op's index, the product that made them,
    if its rows do not lie along the dimension that is summed over, nor across it.
    """

    ops = PRODUCTS | _COPIES | {_LOGS}

    def __init__(self) -> None:
        self.found: dict[int, int] = {}
        self._made: dict[int, _Made] = {}

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        base = op_name(str(func))
        if base == _LOGS:
            made = self._made.get(_place(args[0]))
            if made is not None and args[0].requires_grad and _mixes(args[0], args[1], made):
                self.found[index] = made.index
            return None
        read = next((one for one in args if isinstance(one, Tensor)), None)
        before = self._made.get(_place(read)) if base in _COPIES and read is not None else None

        def done(result: Any) -> None:
            self._made.pop(_place(result), None)
            if result.dim() < 2 or not result.is_contiguous():
                return
            if base in PRODUCTS and base != "convolution":
                made = _Made(index, result.shape[-1], result.numel())
            elif before is not None and read is not None and _keeps(read, result, before):
                made = _Made(before.index, before.width, result.numel())
            else:
                return
            self._made[_place(result)] = made

        return done


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _keeps(read: Tensor, result: Tensor, made: _Made) -> bool:
    """Return whether a result has the rows of what was read."""
    rows = read.shape[-1:] == result.shape[-1:] == (made.width,)
    return rows and read.stride(-1) == 1 and read.shape == result.shape


def _mixes(scores: Tensor, dim: int, made: _Made) -> bool:
    """Return whether neighbours along ``dim`` are neither of one row nor of one column."""
    if scores.dim() < 2 or scores.numel() > made.numel or scores.shape[dim] != made.width:
        return False
    step = scores.stride(dim)
    return scores.shape[dim] > 1 and step != 1 and step % made.width != 0


def mixed_rows(step: Step, mixed: MixedRows) -> tuple[ObjectiveRow, ...]:
    """Return the losses of the first micro-batch whose rows hold scores of several rows.

    Undone bitwise; runs the micro-batch twice for each, and not at all elsewhere.
    """
    rows: list[ObjectiveRow] = []
    for index, maker in mixed.found.items():
        plain, other = (_Scores(index, maker, is_moved=moved) for moved in (False, True))
        for run in (plain, other):
            first_loss(step, run)
        if plain.seen is None or other.seen is None or plain.seen.shape != other.seen.shape:
            continue
        changed = plain.seen != other.seen
        touched, whole = changed.any(-1), changed.all(-1)
        if int(touched.sum()) < 2 or bool(whole.any()):
            continue
        op = first_ops(step)[index]
        rows.append(
            ObjectiveRow(
                op=op.name,
                module=op.module,
                given="mixed",
                width=plain.seen.shape[-1],
                line=line_text(op.line),
            )
        )
    return tuple(rows)


class _Scores(SecondRun):
    """Keeps what a log-softmax reads, its classes last, while the middle row of a product is
    other numbers.
    """

    def __init__(self, index: int, maker: int, *, is_moved: bool) -> None:
        super().__init__()
        self._index, self._maker, self._is_moved = index, maker, is_moved
        self.seen: Tensor | None = None

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index == self._index:
            self.seen = args[0].detach().movedim(args[1], -1).clone()
        result = func(*args, **kwargs)
        if index == self._maker and self._is_moved:
            with torch.no_grad():
                rows = result.view(-1, result.shape[-1])
                rows[len(rows) // 2] += 1.0 + result.abs().amax()  # the ends may be cut off
        return result
