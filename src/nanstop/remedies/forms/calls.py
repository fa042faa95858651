"""A call of one of torch's functions, however it is spelled: ``x.log()``, ``torch.log(x)``,
``a / b``, ``1 - p``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_DEEPEST = 24
"""Frames between an operation and the line that it is blamed on: those of modules and wrappers."""
_SAME = {"divide": "div", "truediv": "div", "true_divide": "div", "subtract": "sub"}
_SAME |= {"multiply": "mul", "clip": "clamp", "arccos": "acos", "arcsin": "asin"}
_SAME |= {"arctanh": "atanh", "negative": "neg", "logaddexp2": "", "special_expit": "sigmoid"}
_REVERSED = {"rtruediv": "div", "rdiv": "div", "rsub": "sub", "radd": "add", "rmul": "mul"}
_REVERSED |= {"rpow": "pow"}


@dataclass(frozen=True, slots=True)
class Call:
    """``name``: of the operation (``div``); ``args``: its operands in the operation's order,
    positional ones first.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return a call of a function mode's."""
        name = getattr(function, "__name__", "").strip("_")
        if name in _REVERSED or (name == "rsub" and len(args) > 1):
            return cls(_REVERSED[name], function, (args[1], args[0], *args[2:]), kwargs)
        return cls(_SAME.get(name, name), function, args, kwargs)

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def read(self) -> Tensor | None:
        """The first operand, None where that is no tensor."""
        first = self.argument(0, "input")
        return first if isinstance(first, Tensor) else None

    def run(self) -> Any:
        """Make the call as the script does."""
        if self.function is None:
            raise TypeError(self.name)
        name = getattr(self.function, "__name__", "").strip("_")
        args = (self.args[1], self.args[0], *self.args[2:]) if name in _REVERSED else self.args
        return self.function(*args, **self.kwargs)


def is_at(file: str, line: int) -> bool:
    """Return whether a line of a file is being executed."""
    frame = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return False
        if frame.f_lineno == line and frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False
