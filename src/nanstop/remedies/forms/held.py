"""A fill with a number beyond the format: with the farthest that the format holds. One with an
infinity: with a finite number. A constant that is not finite: read with finite numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nanstop.records.line_forms import UNEVEN
from nanstop.remedies.forms.calls import Call
from nanstop.rewrite.operations import FILLS

Form = Callable[[Call, Callable[[], bool]], Any]
"""Returns what a call returns; asks whether the line is the one that is meant."""


def answer(call: Call, at_line: Callable[[], bool]) -> Any:
    """Return what a call returns, with a number that its format holds where the line is meant."""
    read, mask, value = call.read, call.argument(1, "mask"), call.argument(2, "value")
    if call.spelled not in FILLS or read is None or not read.is_floating_point():
        return call.run()
    number = float(value) if isinstance(value, Tensor) and not value.dim() else value
    if not isinstance(number, int | float) or not math.isfinite(number) or not at_line():
        return call.run()
    ends = torch.finfo(read.dtype)
    if ends.min <= number <= ends.max:
        return call.run()
    held = ends.min if number < 0 else ends.max
    return getattr(read, call.spelled)(mask, held)


def _may_be_infinite(value: Any) -> bool:
    """Return whether a number of a call may be an infinity. No device work."""
    if isinstance(value, Tensor):
        return not value.dim() and value.is_floating_point()
    return isinstance(value, float) and math.isinf(value)


def finite_of(number: float) -> Form:
    """Return a form in which ``number``, or less than 0 its opposite, is written in place of an
    infinity that the line itself gives to a call.
    """

    def one(value: Any) -> Any:
        if isinstance(value, float) and math.isinf(value):
            return math.copysign(number, value)
        if isinstance(value, Tensor) and _may_be_infinite(value):
            return value.clamp(-number, number) if bool(value.isinf()) else value
        return value

    return _given(_may_be_infinite, one)


def _given(meant: Callable[[Any], bool], one: Callable[[Any], Any]) -> Form:
    """Return a form in which the line's calls are given ``one(value)`` of each of their arguments;
    only calls with one that may be ``meant`` are looked at.
    """

    def answer(call: Call, at_line: Callable[[], bool]) -> Any:
        given = (*call.args, *call.kwargs.values())
        if not any(map(meant, given)) or not at_line():
            return call.run()
        kwargs = {name: one(value) for name, value in call.kwargs.items()}
        args = tuple(map(one, call.args))
        if not call.name:  # what is written to, or marked (`requires_grad_`), is no copy of it
            args = (*call.args[:1], *args[1:])
        return replace(call, args=args, kwargs=kwargs).run()

    return answer


def constants_as(number: str) -> Form:
    """Return a form in which a call reads ``number``, and for -Inf its opposite, where a tensor
    that no gradient is asked of is not finite; not one that asks whether it is, and not what the
    line itself makes of ``number``.
    """
    return _Constants(number).answer


class _Constants:
    """Reads of a line with a number in place of what is not finite."""

    def __init__(self, number: str) -> None:
        self._number = number
        self._made_of_it: MutableMapping[Tensor, bool] = WeakIdKeyDictionary()
        self._changed = _given(self._may_be_read, self._read)

    def answer(self, call: Call, at_line: Callable[[], bool]) -> Any:
        result = self._changed(call, at_line)
        if not isinstance(result, Tensor) or not at_line():
            return result
        if result.dtype is torch.bool:
            return call.run()
        if any(map(self._is_of_it, call.args)) or any(map(self._is_of_it, call.kwargs.values())):
            self._made_of_it[result] = True
        return result

    def _may_be_read(self, value: Any) -> bool:
        return _may_be_constant(value) and value not in self._made_of_it

    def _read(self, value: Any) -> Any:
        if not self._may_be_read(value):
            return value
        if self._number == UNEVEN:
            return torch.where(value.isfinite(), value, uneven(value))
        number = float(self._number)
        return value.nan_to_num(number, number, -number)

    def _is_of_it(self, value: Any) -> bool:
        if not isinstance(value, Tensor):
            return False
        if value in self._made_of_it:
            return True
        return _may_be_constant(value) and not bool(value.isfinite().all())


def uneven(like: Tensor) -> Tensor:
    """Return another number for each place, from -1 to 1, and the same ones each time."""
    places = torch.arange(like.numel(), device=like.device, dtype=torch.float32)
    return places.cos().view(like.shape).to(like.dtype)


def _may_be_constant(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.requires_grad
