"""Which micro-batches of a window are pieces of one batch, and which are several losses of one
step.

Pieces of a batch go through the same program, with other numbers of the same kind: what comes back
is one objective, added up. The real and the fake pass of a GAN, or two losses of two heads, are no
pieces: their programs differ, or what they are given says so (targets that are all 1 here and all 0
there).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nanstop.frozen import frozen
from nanstop.hosts.model.updates import seen_accumulation
from nanstop.hosts.tape.numbers import Number
from nanstop.hosts.tape.tape_calls import Constant, EarlierGraph, Slot, TapedCall
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.records import AccumulationFacts
from nanstop.tracing.places import source_line

LEAST_ROWS = 4
"""Rows in both micro-batches from which values of one without any among those of the other are
no accident (3 %).
"""

T = TypeVar("T")


@frozen
class Program:
    """What a micro-batch was: ``key`` is equal for those that do the same, with other numbers.

    ``given``: the tensors that it did it with, in order, without parameters.
    ``modules``: those that the script called.
    """

    key: Hashable
    given: tuple[Tensor, ...]
    modules: tuple[nn.Module, ...] = ()


def pieces(micros: Iterable[tuple[T, Program | None]]) -> list[T]:
    """Return the most micro-batches that are pieces of one batch, in order; none where no two are.

    Those without a program are left out: nothing can be said of them. Synchronises the device.
    """
    groups: list[list[tuple[T, Program]]] = []
    for micro, program in micros:
        if program is not None:
            mine = next((g for g in groups if _are_alike(g[0][1], program)), None)
            groups.append([(micro, program)]) if mine is None else mine.append((micro, program))
    largest = max(groups, key=len, default=[])
    return [micro for micro, _ in largest] if len(largest) > 1 else []


def _are_alike(one: Program, other: Program) -> bool:
    if one.key != other.key or len(one.given) != len(other.given):
        return False
    pairs = [(a, b) for a, b in zip(one.given, other.given, strict=True) if a.dim()]
    same = all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
    return not same and all(_of_one_kind(a, b) for a, b in pairs)


def _of_one_kind(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors may be rows of one.

    Not each all of one number, nor one's all above the other's.
    """
    if one.dtype != other.dtype or one.dim() != other.dim() or not one.numel() or not other.numel():
        return one.dtype == other.dtype and one.dim() == other.dim()
    rows = min(len(one), len(other))
    if one.is_complex() or rows < 2:
        return True
    (low, high), (least, most) = one.aminmax(), other.aminmax()
    apart = bool((high < least) | (most < low))
    constant = bool((low == high) & (least == most))
    return not apart or not (constant or (one.is_floating_point() and rows >= LEAST_ROWS))


def program_of(micro: TapedMicro) -> Program | None:
    """Return what a taped micro-batch did; None where that was not recorded as a whole.

    What the script made of its data alone is data: such ops are run again.
    """
    needed = micro.tape.needed()
    reading = _Reading()
    try:
        for call in needed:
            reading.read(call)
    except (
        Exception
    ):  # an op of the script's own, run again, or an argument that cannot be compared
        return None
    if not reading.is_whole:
        return None
    modules = dict.fromkeys(c.function for c in needed if isinstance(c.function, nn.Module))
    return Program(tuple(reading.key), tuple(reading.given), tuple(modules))


class _Reading:
    """One walk through the calls of a micro-batch."""

    def __init__(self) -> None:
        self.is_whole = True
        self.key: list[Hashable] = []
        self.given: list[Tensor] = []
        self._made: dict[int, Tensor] = {}
        """Values of what was made of data alone."""
        self._places: dict[int, tuple[int, bool]] = {}
        """Of each result: its place among those of the program, and whether it is one number."""

    def read(self, call: TapedCall) -> None:
        if call.outer:
            call.play(self._made, {})
            return
        # A factor that makes one number of another is a weight:
        # how large it is makes no other objective.
        operands = list(_operands((call.args, call.kwargs)))
        weighs = call.keep or (call.scalar and all(map(self._is_number, operands)))
        self.key.append((_known(call.function), self._of((call.args, call.kwargs), weighs=weighs)))
        for place in call.results:
            self._places[place] = len(self._places), call.scalar

    def _is_number(self, operand: Any) -> bool:
        if isinstance(operand, Slot) and operand.index in self._places:
            return self._places[operand.index][1]
        return isinstance(operand, Constant) and operand.tensor.dim() == 0

    def _of(self, value: Any, *, weighs: bool) -> Hashable:
        if isinstance(value, Slot) and value.index in self._places:
            return "result", self._places[value.index][0]
        if isinstance(value, Slot | Constant):
            moved = isinstance(value, Constant) and value.moved
            self.is_whole &= not moved
            data = value.tensor if isinstance(value, Constant) else self._made[value.index]
            return self._data(data, weighs=weighs)
        if isinstance(value, EarlierGraph):
            self.is_whole = False
        if isinstance(value, Number):
            return _of_number(value.value, weighs=weighs)
        if isinstance(value, tuple | list):
            return tuple(self._of(entry, weighs=weighs) for entry in value)
        if isinstance(value, Mapping):
            return tuple((str(key), self._of(entry, weighs=weighs)) for key, entry in value.items())
        return _of_number(value, weighs=weighs)

    def _data(self, data: Tensor, *, weighs: bool) -> Hashable:
        if data.requires_grad:
            return "parameter", id(data) if data.is_leaf else None
        if data.dim() == 0 or (weighs and data.numel() == 1):
            return "number", _of_number(data.item(), weighs=weighs)
        self.given.append(data.detach())
        return "data"


def _operands(value: Any) -> Iterator[Any]:
    if isinstance(value, Slot | Constant | EarlierGraph):
        yield value
    elif isinstance(value, tuple | list | Mapping):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _operands(entry)


def _of_number(value: Any, *, weighs: bool) -> Hashable:
    """Return what of an argument must be equal.

    Whole numbers beyond 1 are sizes, of a weight only the sign counts.
    """
    if isinstance(value, bool | str | type(None) | torch.dtype | torch.device | type):
        return value
    if isinstance(value, int | float):
        if weighs:
            return (value > 0) - (value < 0)
        return value if isinstance(value, float) or abs(value) < 2 else "size"
    return type(value)


def _known(function: Any) -> Hashable:
    """Return what tells a function from others; a partial one is what it stands for."""
    if isinstance(function, partial):
        return _known(function.func), tuple(map(id, function.args))
    return id(function) if isinstance(function, nn.Module) else function


def program_of_function(function: Any, batch: Mapping[str, Any]) -> Program:
    """Return the program of a loss function that was called with a batch.

    What it holds is a part of it.
    """
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    held = (*cells, *(getattr(function, "__defaults__", None) or ()))
    key = getattr(function, "__code__", None) or _known(function), tuple(map(id, held))
    return Program(key, tuple(v.detach() for v in batch.values() if isinstance(v, Tensor)))


def accumulation_in(
    micros: Sequence[TapedMicro], updated: Iterable[Tensor]
) -> AccumulationFacts | None:
    """Return how a window's own losses and gradients are made one; ``updated``: what its update
    changes. Synchronises the device.
    """
    seen = [micro for micro in micros if micro.loss is not None]
    if len(seen) < 2:
        return None
    programs = {id(micro): program_of(micro) for micro in seen}
    split = pieces((micro, programs[id(micro)]) for micro in seen)
    program = programs[id(split[0])] if split else None
    found = seen_accumulation(
        program.modules if program is not None else (),
        [micro.batch for micro in split],
        [float(micro.loss) for micro in split if micro.loss is not None],
        (parameter.grad for parameter in updated),
    )
    return replace(found, made_at=source_line(split[0].made_at)) if found and split else found
