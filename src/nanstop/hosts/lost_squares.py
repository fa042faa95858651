"""Squares of gradients that a script's own update keeps in float16, where small ones are 0, and
divides by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from nanstop.tracing.places import Line, user_line

LEAST_SHARE = 0.01
_SQUARES = frozenset({"square", "square_"})
_PRODUCTS = frozenset({"mul", "mul_", "__mul__", "__rmul__", "__imul__"})
_WITH_PRODUCTS = frozenset({"addcmul", "addcmul_"})
_POWERS = frozenset({"pow", "pow_", "__pow__", "__ipow__"})
_DIVISORS = {
    **dict.fromkeys(("div", "div_", "true_divide", "__truediv__", "__itruediv__"), 1),
    **dict.fromkeys(("__rtruediv__", "rsqrt", "rsqrt_", "reciprocal", "reciprocal_"), 0),
    **dict.fromkeys(("addcdiv", "addcdiv_"), 2),
}
"""Of what divides, the place of what it divides by."""


@dataclass(slots=True)
class _Square:
    """What is made of the squares of a gradient. ``had``: where that gradient is not 0; ``share``:
    of those, what a line, ``line``, has left at 0 in float16.
    """

    had: Tensor
    share: float = 0.0
    line: Line = None


class LostSquares:
    """Follows what is made of squares of gradients, by the very tensors. Synchronises the device
    where they are in float16.
    """

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def after(self, name: str, args: Sequence[Any], result: Any, *, is_of_gradient: bool) -> Any:
        """Look at a call that was made; return the share of squares that are 0 by their format and
        the line that made them so, where the call divides by them; else None.
        """
        divisor = args[_DIVISORS[name]] if len(args) > _DIVISORS.get(name, 99) else None
        lost = self._known.get(divisor) if isinstance(divisor, Tensor) else None
        square = self._of(name, args, is_of_gradient=is_of_gradient)
        if square is not None and isinstance(result, Tensor) and result.is_floating_point():
            self._known[result] = _looked_at(square, result)
        return (lost.share, lost.line) if lost is not None and lost.share > LEAST_SHARE else None

    def _of(self, name: str, args: Sequence[Any], *, is_of_gradient: bool) -> _Square | None:
        """Return what the result of a call has of squares, None for nothing."""
        given = [one for one in args if isinstance(one, Tensor)]
        if given and is_of_gradient and _is_square(name, args):
            return _Square(given[-1].detach() != 0)
        known = [self._known[one] for one in given if one in self._known]
        return max(known, key=lambda one: one.share, default=None)


def _is_square(name: str, args: Sequence[Any]) -> bool:
    if name in _SQUARES:
        return True
    if name in _PRODUCTS | _WITH_PRODUCTS:
        return len(args) > 1 and args[-1] is args[-2]
    return name in _POWERS and len(args) > 1 and args[1] == 2


def _looked_at(square: _Square, result: Tensor) -> _Square:
    is_alike = result.shape == square.had.shape
    if result.dtype != torch.float16 or not is_alike or square.share > LEAST_SHARE:
        return square
    num = int(square.had.sum())
    share = int((square.had & (result == 0)).sum()) / num if num else 0.0
    return _Square(square.had, share, user_line()) if share > LEAST_SHARE else square
