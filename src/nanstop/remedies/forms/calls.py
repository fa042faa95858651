"""A call of one of torch's functions, however it is spelled: ``x.log()``, ``torch.log(x)``,
``a / b``, ``1 - p``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from nanstop.own_code import is_wrapper

_SAME = {"divide": "div", "truediv": "div", "true_divide": "div", "subtract": "sub"}
_SAME |= {"multiply": "mul", "clip": "clamp", "arccos": "acos", "arcsin": "asin"}
_SAME |= {
    "arccosh": "acosh",
    "arctanh": "atanh",
    "arctan2": "atan2",
    "negative": "neg",
    "special_expit": "sigmoid",
    "special_entr": "entr",
    "special_xlogy": "xlogy",
    "special_i0": "i0",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_ndtr": "ndtr",
    "special_ndtri": "ndtri",
    "special_logit": "logit",
    "special_erfinv": "erfinv",
}
_REVERSED = {"rtruediv": "div", "rdiv": "div", "rsub": "sub", "radd": "add", "rmul": "mul"}
_REVERSED |= {"rpow": "pow", "rmatmul": "matmul"}

_TRANSPOSED = frozenset({"T", "mT"})


@dataclass(frozen=True, slots=True)
class Call:
    """``name``: of the operation (``div``), "" where it writes in place or into ``out``; ``args``:
    its operands in the operation's order, positional ones first.
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

    @property
    def spelled(self) -> str:
        """What the operation is called where it writes in place as well (``masked_fill_``)."""
        return self.name or getattr(self.function, "__name__", "")

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
    """Return what a function is called, "" for one that writes in place; of properties those that
    compute something have a name.
    """
    name = getattr(function, "__name__", "")
    if name == "__get__":
        of = getattr(getattr(function, "__self__", None), "__name__", "")
        return of if of in _TRANSPOSED else "get"
    if name.startswith("__"):
        return name.strip("_")
    return "" if name.endswith("_") else name.removeprefix("_")


def line_in(file: str) -> int | None:
    """Return the line of a file that asks for the operation being made: the innermost that is no
    wrapper's, as traces have it. None where that lies elsewhere.
    """
    frame = frame_in(file)
    return None if frame is None else frame.f_lineno


def frame_in(file: str) -> FrameType | None:
    """Return the frame of the line that ``line_in`` returns."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == file:
            return frame
        if not is_wrapper(name):
            return None
        frame = frame.f_back
    return None
