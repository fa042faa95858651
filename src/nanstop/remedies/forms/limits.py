"""Numbers that are 0 where a line has no value, a little off 0 wherever they are read: what a value
goes to there, which a guard may or may not give.

What a line divides by is often 0 because another number is, of which it also reads the sine or the
product: the quotient alone says nothing of what the whole goes to.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.guarded import is_guarded
from nanstop.replay.path import no_choices

_BY = {"div": (1, "other"), "xlogy": (1, "other")}
"""Which operand may be 0 where that is not the first."""


class Zeros:
    """The tensors of a run by their numbers, in the order in which calls that one file makes read
    and return them, the same in each run of one step. ``of_data``: whether no gradient is asked of
    any that is 0 where a line of the file has no value.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        self.of_data = True
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._roots: dict[int, tuple[int, bool]] = {}
        self._next = 0

    def look(self, call: Call, line: int | None, meant: Collection[int]) -> Any:
        """Make a call, and note what is 0 where it has no value, and which tensor that is from.
        ``line``: of the file, None for a call of another one; ``meant``: the lines. Synchronises
        the device.
        """
        if line is None or call.name in _ASKED:
            return call.run()
        read = [*map(self._number, _read(call))]
        result = call.run()
        self._number_all(result)
        with no_choices(), torch.no_grad():
            if is_guarded(call) and line in meant:
                self._note(call, result)
            if isinstance(result, Tensor) and result.is_floating_point():
                self._descend(call, result, read)
        return result

    def moved(self, call: Call, line: int | None, numbers: frozenset[int], by: float) -> Any:
        """Make a call with ``by`` in place of what is 0 in the tensors of these numbers; not one
        that asks something of them.
        """
        if line is None or call.name in _ASKED:
            return call.run()
        read = _read(call)
        given = {id(one): one for one in read if self._number(one) in numbers}
        result = (_with(call, given, by) if given else call).run()
        if given and isinstance(result, Tensor) and result.dtype is torch.bool:
            result = call.run()
        self._number_all(result)
        return result

    def _number_all(self, result: Any) -> None:
        for one in result if isinstance(result, list | tuple) else (result,):
            if isinstance(one, Tensor):
                self._number(one)

    def _number(self, tensor: Tensor) -> int:
        reference, number = self._numbers.get(id(tensor), (None, 0))
        if reference is not None and reference() is tensor:
            return number
        self._numbers[id(tensor)] = weakref.ref(tensor), self._next
        self._next += 1
        return self._next - 1

    def _note(self, call: Call, result: Any) -> None:
        place, name = _BY.get(call.name, (0, "input"))
        operand = call.argument(place, name)
        if not isinstance(operand, Tensor) or not operand.is_floating_point():
            return
        if isinstance(result, Tensor) and not result.isfinite().all() and (operand == 0).any():
            number = self._number(operand)
            root, is_data = self._roots.get(number, (number, not operand.requires_grad))
            self.found.add(root)
            self.of_data &= is_data

    def _descend(self, call: Call, result: Tensor, read: Sequence[int]) -> None:
        """Note what is 0 where a result is, and only there: that is 0 because of it."""
        zeros = result == 0
        if not zeros.any():
            return
        for number, one in zip(read, _read(call), strict=True):
            if not one.is_floating_point() or one.shape != result.shape:
                if one.numel() != result.numel() or call.name not in _VIEWS:
                    continue
            elif not torch.equal(one == 0, zeros):
                continue
            own = self._number(result)
            self._roots[own] = self._roots.get(number, (number, not one.requires_grad))
            return


_ASKED = ("get", "set", "delete")
"""Calls that ask something of a tensor itself, or set it."""
_VIEWS = ("squeeze", "unsqueeze", "view", "reshape", "flatten", "getitem", "transpose", "expand")
_VIEWS += ("permute", "t", "T", "mT")


def _read(call: Call) -> list[Tensor]:
    return [*_tensors(call.args), *_tensors(call.kwargs.values())]


def _tensors(given: Any) -> Iterator[Tensor]:
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from (part for part in one if isinstance(part, Tensor))


def _with(call: Call, given: dict[int, Tensor], by: float) -> Call:
    """Return a call of numbers that are in float64, in which digits of differences are left."""
    with no_choices():
        other = {
            key: torch.where(one == 0, by, one.double())
            for key, one in given.items()
            if one.is_floating_point()
        }

    def one(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(one, value)) if type(value) in (list, tuple) else value
        return other.get(id(value), value)

    kwargs = {name: one(value) for name, value in call.kwargs.items()}
    return Call(call.name, call.function, tuple(map(one, call.args)), kwargs)
