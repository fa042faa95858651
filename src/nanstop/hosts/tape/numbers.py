"""What a script reads of results: Python numbers that it hands on, and answers to its questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nanstop.frozen import frozen
from nanstop.hosts.tape.tape_functions import LOOKS, READS
from nanstop.numerics.tensors import by_torch_alone, is_inexact
from nanstop.tracing.places import Line, user_line


@dataclass(slots=True, eq=False)
class Number:
    """A Python number that the script has read of a result, at ``line``, and hands on: the very
    object. ``slot``: of that result.
    """

    value: float
    slot: int
    line: Line


class Numbers:
    """Those that were read, by the id of the object, which they hold."""

    def __init__(self) -> None:
        self._known: dict[int, Number] = {}

    def read(self, number: Any, slot: int | None, line: Line) -> None:
        """Know a number of a result again where the script hands it on; of anything else it is
        only a number.
        """
        if slot is not None and type(number) is float:
            self._known[id(number)] = Number(number, slot, line)

    def read_of(self, tensor: Tensor, number: Any, slot_of: Callable[[Any], int | None]) -> Any:
        """Return a number, known again if it was read of a result that has a gradient."""
        with by_torch_alone():
            slot = slot_of(tensor) if tensor.requires_grad else None
            if slot is not None:
                self.read(number, slot, user_line())
        return number

    def of(self, value: Any) -> Any:
        """Return the number that a value is, as it was read; else the value."""
        number = self._known.get(id(value)) if type(value) is float else None
        return number if number is not None and number.value is value else value


class _Slot(Protocol):
    @property
    def index(self) -> int: ...


_Operand = tuple[Tensor, int, _Slot | None]
"""See ``TapedOperand``."""


@frozen
class Question:
    """An answer that the script has read, at ``line``: whether something was so, or how often.

    ``slot``: of the result that it read, which holds no rounded numbers. ``said``: whether it was
    other than 0.
    """

    slot: int
    line: Line
    said: bool


class Questions:
    """The last that a script has asked of what its model has made.

    ``looked_at``: the slot and the value of the last single number that it has read, or of which it
    has asked whether it is finite or equal to itself. ``compared``: the last that it has compared.
    """

    def __init__(self) -> None:
        self.looked_at: tuple[int, Tensor] | None = None
        self.compared: Tensor | None = None
        self.last: Question | None = None

    def note(self, func: Any, line: Line, operands: Sequence[_Operand], result: Any) -> int | None:
        """Note what ``func`` has answered or brought to Python; return the slot of what it was
        asked of, None if that is no result. No device work.
        """
        known = next(((one, slot.index) for one, _, slot in operands if slot is not None), None)
        if known is None:
            return None
        tensor, slot = known
        if not is_inexact(tensor):
            if func in READS:
                said = bool(result) if type(result) in (bool, int) else True
                self.last = Question(slot, line, said)
        elif tensor.numel() == 1:
            is_of_itself = len(operands) > 1 and operands[0][0] is operands[1][0]
            if func in LOOKS or func in READS or is_of_itself:
                self.looked_at = slot, tensor.detach()
            else:
                self.compared = tensor.detach()
        return slot


def is_answer(result: Any) -> bool:
    """Return whether a result says of something whether it is so."""
    if isinstance(result, Tensor):
        return result.dtype is torch.bool
    return result is True or result is False
