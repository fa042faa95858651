"""Whether targets that are looked through for -1 and 1 are 0 and 1.

A loss of pairs that are alike or not (cosines, distances) treats targets of 1 and of -1 each in a
way of its own, and those of 0 in neither: what is unlike is never pushed apart, and all comes to
one point. That both are asked for is seen in the comparisons; that it matters, by an experiment:
the micro-batch run again, undone, with -1 in the place of 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nanstop.detect.objective.operands.numbers import are_binary
from nanstop.records import ObjectiveRow
from nanstop.tracing.op_patches import LookOfSome, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

SAME = 1e-6
"""Of the loss: by so much it may differ where -1 in the place of 0 is nothing to it."""


class Signs(LookOfSome):
    """Keeps which numbers targets are compared with, by their memory: the op of each number.

    Where 0 is one of them, it is meant.
    """

    ops = frozenset({"eq", "ne"})

    def __init__(self) -> None:
        self.asked: dict[StorageWeakRef, dict[float, int]] = {}

    def __call__(
        self, index: int, _func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        targets, number = args[:2]
        if isinstance(number, Tensor) or number not in (-1, 0, 1) or not are_binary(targets):
            return None
        place = StorageWeakRef(targets.untyped_storage())
        self.asked.setdefault(place, {}).setdefault(float(number), index)
        return None


def unsigned_rows(step: Step, signs: Signs) -> tuple[ObjectiveRow, ...]:
    """Return the first comparison of targets of the first micro-batch that are 0 and 1, and are
    asked for -1 and 1.

    Undone bitwise; runs the micro-batch three times where there are any, and not at all elsewhere.
    Synchronises the device.
    """
    found = [by for by in signs.asked.values() if by.keys() == {-1.0, 1.0}]
    rows: list[ObjectiveRow] = []
    for by in found[:1]:
        plain, other = first_loss(step, SecondRun()), first_loss(step, _Signed(set(by.values())))
        if abs(other - plain) <= SAME * abs(plain):
            continue
        op = first_ops(step)[min(by.values())]
        row = ObjectiveRow(
            op=op.name, module=op.module, given="never_below", width=0, line=line_text(op.line)
        )
        rows.append(row)
    return tuple(rows)


class _Signed(SecondRun):
    """Has some comparisons read -1 in the place of 0."""

    def __init__(self, at: set[int]) -> None:
        super().__init__()
        self._at = at

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index in self._at:
            args = (2 * args[0] - 1, *args[1:])
        return func(*args, **kwargs)
