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
_SAME |= {
    "arctanh": "atanh",
    "negative": "neg",
    "special_expit": "sigmoid",
    "special_xlogy": "xlogy",
}
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
        name = _name(function)
        if kwargs.get("out") is not None:
            return cls("", function, args, kwargs)
        if name in _REVERSED:
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

    def of_another(self, read: Tensor) -> Any:
        """Return what the function makes of another first operand, all else being the same."""
        if self.args:
            return self.function(read, *self.args[1:], **self.kwargs)
        return self.function(**{**self.kwargs, "input": read})

    def run(self) -> Any:
        """Make the call as the script does."""
        is_reversed = _name(self.function) in _REVERSED
        args = (self.args[1], self.args[0], *self.args[2:]) if is_reversed else self.args
        return self.function(*args, **self.kwargs)


def _name(function: Any) -> str:
    """Return what a function is called, "" for one that writes in place."""
    name = getattr(function, "__name__", "")
    if name.startswith("__"):
        return name.strip("_")
    return "" if name.endswith("_") else name.removeprefix("_")


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
