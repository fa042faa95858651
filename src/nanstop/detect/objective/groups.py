"""Whether rows are compared with the mean of a group that is each row alone.

A value less the mean of one value is 0 whatever the value is: advantages over groups of one, say.
That a mean is of one value each is seen in the shapes; that the objective is lost by it, by an
experiment: the micro-batch run again, undone, with differences in that place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import ramp
from nanstop.records import ObjectiveRow, op_name
from nanstop.tracing.op_patches import LookOfSome, OtherResult
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

MOST_MEANS = 8


class Groups(LookOfSome):
    """Keeps, by the op's index, how many values are less their own mean."""

    ops = frozenset({"mean", "sub"})

    def __init__(self) -> None:
        self.found: dict[int, int] = {}
        self._means: list[tuple[Tensor, Tensor]] = []
        """Means of one value each, and what they are of; held, so that both keep their places in
        memory.
        """

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if not args or not isinstance(args[0], Tensor):
            return None
        if op_name(str(func)) == "mean":
            return self._kept(args[0].detach())
        if isinstance(args[1], Tensor) and self._is_own_mean(*args[:2]):
            self.found[index] = args[0].numel()
        return None

    def _kept(self, read: Tensor) -> Callable[[Any], None]:
        def done(result: Any) -> None:
            if result.numel() == read.numel() > 1:
                self._means = [*self._means[1 - MOST_MEANS :], (result.detach(), read)]

        return done

    def _is_own_mean(self, value: Tensor, other: Tensor) -> bool:
        """Return whether a value meets its own mean, as it was made or in a copy: values that
        differ among themselves are the same by no chance.
        """
        if value.numel() != other.numel() or _in_order(value) != _in_order(other):
            return False
        value, other = value.detach(), other.detach()
        return any(
            (_same_place(value, read) and _same_place(other, mean))
            or (_same_values(value, read) and _same_values(other, mean))
            for mean, read in self._means
        )


def _same_place(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.numel() == other.numel()


def _same_values(one: Tensor, other: Tensor) -> bool:
    first, second = one.flatten(), other.flatten()
    return torch.equal(first, second) and bool((first != first[0]).any())


def _in_order(tensor: Tensor) -> tuple[int, ...]:
    """Return sizes without those of 1: where these are equal, each value meets one other."""
    return tuple(size for size in tensor.shape if size != 1)


def lone_rows(step: Step, groups: Groups) -> tuple[ObjectiveRow, ...]:
    """Return the op that takes each value's own mean off it, where the loss of the first
    micro-batch is made of that.

    Undone bitwise; runs the micro-batch twice for each op that may be one, and not at all where
    none is. Synchronises the device.
    """
    for index, num in groups.found.items():
        if first_loss(step, _spread(-1)) != first_loss(step, _spread(index)):
            op = first_ops(step)[index]
            line = line_text(op.line)
            return (
                ObjectiveRow(op=op.name, module=op.module, given="own_mean", width=num, line=line),
            )
    return ()


def _spread(index: int) -> OtherResult:
    """Have one op give differences."""
    return OtherResult(index, lambda found: found + ramp(found))
