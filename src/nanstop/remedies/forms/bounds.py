"""Exponentials, logarithms and functions between poles of one line, of numbers within bounds: what
a person types who keeps a step in range by a number of their own choice, ``x.clamp(max=20).exp()``.
A whole number, and a count that is divided by, is kept from 0 by 1.

What lies within keeps its value and its derivative; beyond a bound the derivative is 0. Where the
loss hangs on the bound, a run under it proves no more than that the step is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import format_name
from nanstop.records.formats import least_number, margin, most_exponent
from nanstop.records.line_forms import BETWEEN_POLES, HAVE_BOUNDS, OF_COUNTS
from nanstop.remedies.forms.calls import Call
from nanstop.replay.path import no_choices


def answer(call: Call, at_line: Callable[[], bool], *, is_other: bool = False) -> Any:
    """Return what a call returns of numbers within its bound where the line is meant. ``is_other``:
    within another bound; of what has a pole where no weight has a part in it. What lies beyond the
    pole is then as far on this side of it: next to it where only rounding took it there.
    """
    bounded = _BOUNDED.get(call.name)
    read = call.read
    if bounded is None or read is None or not has_values(read) or not at_line():
        return call.run()
    with no_choices():
        is_whole = not read.is_floating_point()
        return call.of_another(_count(read, is_other) if is_whole else bounded(read, is_other))


def has_values(read: Tensor) -> bool:
    """Return whether a tensor holds numbers with an order, floating-point or whole ones."""
    return not read.is_complex() and read.dtype is not torch.bool


def counted(call: Call, at_line: Callable[[], bool], *, is_other: bool = False) -> Any:
    """Return what a call returns with a count of 1 in place of each 0 that it divides by, where the
    line is meant. ``is_other``: of 2.
    """
    exponent = call.argument(1, "exponent") if call.name == "pow" else -1.0
    divides = isinstance(exponent, int | float) and exponent < 0.0
    if call.name not in OF_COUNTS or not divides or not at_line():
        return call.run()
    is_quotient = call.name == "div"
    count = call.argument(1, "other") if is_quotient else call.read
    if not isinstance(count, Tensor) or not has_values(count) or call.kwargs.get("rounding_mode"):
        return call.run()
    with no_choices():
        count = count.masked_fill(count == 0, 2 if is_other else 1)
        return call.argument(0, "input") / count if is_quotient else call.of_another(count)


def _count(read: Tensor, is_other: bool) -> Tensor:
    return torch.where(read < 1, torch.full_like(read, 2.0 if is_other else 1.0), read)


def far_below_0(read: Tensor) -> Tensor:
    """Return which numbers are further below 0 than rounding takes one of numbers this large."""
    size = read.detach().abs().amax() if read.numel() else 0.0
    return read.detach() < -math.sqrt(torch.finfo(read.dtype).eps) * size


def _exponent(read: Tensor, is_other: bool) -> Tensor:
    most = most_exponent(format_name(read.dtype))
    return read.clamp(max=most - 1.0 if is_other else most)


def _number(read: Tensor, is_other: bool) -> Tensor:
    least = least_number(format_name(read.dtype))
    if not is_other:
        return read.clamp(min=least)
    least = least if read.requires_grad else 16.0 * least
    return torch.where(far_below_0(read), read.abs(), read).clamp(min=least)


def _between(low: float, high: float, read: Tensor, is_other: bool) -> Tensor:
    near = margin(format_name(read.dtype))
    if is_other:
        near = near if read.requires_grad else 16.0 * near
        read = read - 2.0 * (read - high).clamp(min=0.0) + 2.0 * (low - read).clamp(min=0.0)
    return read.clamp(low + near, high - near)


_BOUNDED: Mapping[str, Callable[[Tensor, bool], Tensor]] = {
    **{name: _exponent if name == "exp" else _number for name in HAVE_BOUNDS},
    **{name: partial(_between, *ends) for name, ends in BETWEEN_POLES.items()},
}
