"""Numbers that are 0 where a line has no value, a little off 0 wherever they are read: what a value
goes to there, which a guard may or may not give.

What a line divides by is often 0 because another number is, of which it also reads the sine or the
product: the quotient alone says nothing of what the whole goes to.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
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
    any that is 0 where a line of the file has no value. ``are_divisors``: whether each is what the
    line divides by itself, and not what that is 0 because of.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()
        self.of_data = True
        self.are_divisors = True
        self._numbers: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._roots: dict[int, tuple[int, bool]] = {}
        self._counts: set[int] = set()
        """Those that come no nearer to 0 than 1."""
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
            if line in meant:
                self._note(call, result)
            if isinstance(result, Tensor) and result.is_floating_point():
                self._descend(call, result, read)
                if call.name in _COUNTING and _is_whole(result):
                    self._counts.add(self._number(result))
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
        operand = _divides(call)
        if operand is None:
            return
        if isinstance(result, Tensor) and not result.isfinite().all() and (operand == 0).any():
            number = self._number(operand)
            root, is_data = self._roots.get(number, (number, not operand.requires_grad))
            if root not in self._counts:
                self.found.add(root)
                self.of_data &= is_data
                self.are_divisors &= root == number

    def _descend(self, call: Call, result: Tensor, read: Sequence[int]) -> None:
        """Note what is 0 where a result is, and only there: that is 0 because of it."""
        zeros = result == 0
        if not zeros.any():
            return
        for number, one in zip(read, _read(call), strict=True):
            if not one.is_floating_point():
                continue
            if one.shape != result.shape:
                if one.numel() != result.numel() or call.name not in _VIEWS:
                    continue
            elif not torch.equal(one == 0, zeros):
                continue
            own = self._number(result)
            self._roots[own] = self._roots.get(number, (number, not one.requires_grad))
            return


_COUNTING = ("sum", "nansum", "bincount", "index_add", "scatter_add", "matmul", "mm", "mv")
_ASKED = ("", "get", "set", "delete", "setitem")
_ASKED += ("iadd", "isub", "imul", "idiv", "itruediv", "ipow")
"""Calls that ask something of a tensor itself, set it, or write to it: of no other one."""
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
    return _put(call, other)


def _put(call: Call, other: Mapping[int, Tensor]) -> Call:
    """Return a call of other tensors in the place of some, by their ids."""

    def one(value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(map(one, value))
        return other.get(id(value), value)

    kwargs = {name: one(value) for name, value in call.kwargs.items()}
    return Call(call.name, call.function, tuple(map(one, call.args)), kwargs)


def _divides(call: Call) -> Tensor | None:
    """Return what a call divides by, or takes the logarithm of; None where that is no number."""
    place, name = _BY.get(call.name, (0, "input"))
    operand = call.argument(place, name)
    is_number = isinstance(operand, Tensor) and operand.is_floating_point()
    return operand if is_number and is_guarded(call) else None


def _is_whole(summed: Tensor) -> bool:
    """Return whether sums that no gradient is asked of are of whole numbers alone."""
    return not summed.requires_grad and bool((summed == summed.round()).all())


class OffZero:
    """Computes what a line has no value for of numbers that are ``by`` in place of 0, and hands
    these on wherever its file reads them afterwards. What of the line has read them before is
    computed anew: sin(x) / x needs both.
    """

    def __init__(self, by: float) -> None:
        self._by = by
        self._moved: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._calls: list[tuple[Call, Any]] = []

    def answer(self, call: Call, line: int | None, meant: int) -> Any:
        """Return what a call of a ``line`` of the file returns. Synchronises the device."""
        if line is None or call.name in _ASKED:
            return call.run()
        if line != meant:
            self._calls.clear()
        changed = self._changed(call)
        result = changed.run()
        if changed is not call and isinstance(result, Tensor) and result.dtype is torch.bool:
            return call.run()
        if line != meant:
            return result
        divisor = _divides(changed)
        if divisor is not None and isinstance(result, Tensor):
            with no_choices():
                if (divisor == 0).any() and not result.isfinite().all():
                    self._move(divisor)
                    result = self._changed(changed).run()
        self._calls.append((changed, result))
        return result

    def _move(self, divisor: Tensor) -> None:
        """Move what is 0 off it, in the tensor that a divisor is 0 because of."""
        root = divisor
        for made, result in reversed(self._calls):
            if result is root:
                root = next((one for one in _read(made) if _are_zero_alike(one, root)), root)
        self._remember(root, torch.where(root == 0, self._by, root))
        for made, result in self._calls:
            changed = self._changed(made)
            if changed is not made and isinstance(result, Tensor):
                self._remember(result, changed.run())

    def _changed(self, call: Call) -> Call:
        other = {
            id(one): self._moved[id(one)][1]
            for one in _read(call)
            if id(one) in self._moved and self._moved[id(one)][0]() is one
        }
        return _put(call, other) if other else call

    def _remember(self, old: Tensor, new: Tensor) -> None:
        key = id(old)
        self._moved[key] = weakref.ref(old, lambda _: self._moved.pop(key, None)), new


def _are_zero_alike(one: Tensor, other: Tensor) -> bool:
    is_number = one.is_floating_point() and one.shape == other.shape
    return is_number and torch.equal(one == 0, other == 0)
