"""Python numbers that a script reads of results and hands on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanstop.measure.followed import Line
from nanstop.numerics.tensors import by_torch_alone
from nanstop.tracing.places import user_line


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
