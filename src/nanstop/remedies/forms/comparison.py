"""Whether a guard leaves alone what has a value: a call in both ways, values and derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import tensors
from nanstop.remedies.forms.calls import Call

_OF_DOMAIN = frozenset(
    {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow", "acos", "asin", "atanh", "acosh"}
)
"""Functions of each number by itself, which are not defined for some."""
_MUCH = 0.25
_SAME = 16
"""Spacings of a format that two ways to one number may be apart."""


class Comparison:
    """``num_same``: values and derivatives that are finite in the old form and the same in the new
    one; ``num_other``: those that are another number there. ``is_left_out``: a quotient was
    infinite throughout, so that its divisor is a setting and no count of the batch, or a function
    is undefined for ``_MUCH`` of what it was given, as after a mistaken sign or of data that it is
    not made for: that all of this may be left out needs another witness than the calls that read
    what was put there.
    """

    def __init__(self) -> None:
        self.num_same = self.num_other = 0
        self.is_left_out = False

    @property
    def unchanged(self) -> bool | None:
        """Whether everything that had a value kept it; None where that is not known."""
        if self.num_other:
            return False
        return True if self.num_same and not self.is_left_out else None

    def look(self, call: Call, guard: Callable[[Call], Any]) -> None:
        """Make a call in both ways on copies of what it reads. Synchronises the device."""
        leaves = _copied(call)
        with torch.enable_grad():
            both = leaves.run(), guard(leaves)
        for old, new in zip(*map(tensors, both), strict=False):
            self._compare(call, leaves, old, new)

    def _compare(self, call: Call, leaves: Call, old: Tensor, new: Tensor) -> None:
        known = old.detach().isfinite()
        self.is_left_out |= call.name == "div" and bool(old.isinf().any()) and not known.any()
        if call.name in _OF_DOMAIN and old.numel():
            self.is_left_out |= float(old.isnan().float().mean()) >= _MUCH
        self._count(old.detach(), new.detach())
        read = [x for x in leaves.args if isinstance(x, Tensor) and x.requires_grad]
        if read and old.requires_grad and new.requires_grad:
            seed = known.to(old.dtype)
            for before, after in zip(
                *(_derivatives(y, read, seed) for y in (old, new)), strict=True
            ):
                self._count(before, after)

    def _count(self, old: Tensor, new: Tensor) -> None:
        known = old.isfinite()
        size = torch.finfo(old.dtype).eps * _SAME * old.abs().clamp(min=1e-3)
        same = known & ((new - old).abs() <= size)
        self.num_same += int(same.sum())
        self.num_other += int((known & ~same).sum())


def _copied(call: Call) -> Call:
    return replace(call, args=tuple(_leaf(x) for x in call.args))


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_() if copy.is_floating_point() else copy


def _derivatives(result: Tensor, read: Sequence[Tensor], seed: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(result, read, seed.to(result.dtype), allow_unused=True)
    return [torch.zeros_like(x) if one is None else one for x, one in zip(read, found, strict=True)]
