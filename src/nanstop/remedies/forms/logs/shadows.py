"""Numbers whose logarithm is known from how they are made: probabilities, exponentials, squares of
what is squashed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanstop.remedies.forms.calls import Call

Log = Callable[[], Tensor]

_AS_EXPONENTIAL = -20.0
"""Below it log(softplus(x)) is x but for half of exp(x), 1e-9."""


@dataclass(frozen=True, slots=True)
class Shadow:
    """The logarithm of a positive number that is known without the number.

    ``of_rest``: the logarithm of one minus the number, where that is known too, and ``of_more``: of
    one plus it. ``square``: of a number of either sign, the shadow of its square, and then it has
    no ``log``. ``version``: of the number's values. ``is_meant``: whether the line of the form made
    it, or what it is made of. ``factor``: the number is this times the exponential of ``log``.
    """

    log: Log
    of_rest: Log | None = None
    of_more: Log | None = None
    square: Shadow | None = None
    version: int = 0
    is_meant: bool = False
    factor: Log | None = None


def softmax_from(call: Call, _: Any) -> Shadow | None:
    read, dim = call.read, call.argument(1, "dim")
    if read is None or not isinstance(dim, int):
        return None
    dtype = call.argument(2, "dtype") if call.name == "softmax" else None
    wide = dtype if isinstance(dtype, torch.dtype) else read.dtype
    return Shadow(
        lambda: functional.log_softmax(read.to(wide), dim),
        lambda: _rest_of_softmax(read.to(wide), dim),
    )


def _rest_of_softmax(scores: Tensor, dim: int) -> Tensor:
    """Return log(1 - softmax), whose largest element may be 1 but for a rounding: of that one it is
    the share of the others.
    """
    log = functional.log_softmax(scores, dim)
    largest = scores.argmax(dim, keepdim=True)
    others = scores.scatter(dim, largest, -torch.inf).logsumexp(dim, keepdim=True)
    rest = _log_of_rest(log.scatter(dim, largest, -math.log(2.0)))
    return rest.scatter(dim, largest, others - scores.logsumexp(dim, keepdim=True))


def sigmoid_from(call: Call, _: Any) -> Shadow | None:
    read = call.read
    if read is None:
        return None
    return Shadow(lambda: functional.logsigmoid(read), lambda: functional.logsigmoid(-read))


def tanh_from(call: Call, _: Any) -> Shadow | None:
    read = call.read
    if read is None:
        return None

    def log_of_rest() -> Tensor:
        return 2 * (math.log(2.0) - read - functional.softplus(-2 * read))

    square = Shadow(lambda: 2 * torch.log(torch.tanh(read).abs()), log_of_rest)
    return Shadow(
        lambda: torch.log(torch.tanh(read)),
        lambda: math.log(2.0) + functional.logsigmoid(-2 * read),
        lambda: math.log(2.0) + functional.logsigmoid(2 * read),
        square=square,
    )


def erf_from(call: Call, _: Any) -> Shadow | None:
    """Return the shadow of erf, which may be negative; one plus or minus it is a normal's tail."""
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    square = Shadow(lambda: 2 * torch.log(torch.erf(read).abs()))
    return Shadow(
        lambda: torch.log(torch.erf(read)),
        lambda: _log_erfc(read),
        lambda: _log_erfc(-read),
        square=square,
    )


def erfc_from(call: Call, _: Any) -> Shadow | None:
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    return Shadow(lambda: _log_erfc(read))


def ndtr_from(call: Call, _: Any) -> Shadow | None:
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    return Shadow(lambda: torch.special.log_ndtr(read), lambda: torch.special.log_ndtr(-read))


def _log_erfc(read: Tensor) -> Tensor:
    return math.log(2.0) + torch.special.log_ndtr(-math.sqrt(2.0) * read)


def i0_from(call: Call, _: Any) -> Shadow | None:
    """Return the shadow of a Bessel function that grows as an exponential does."""
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    return Shadow(lambda: torch.log(torch.special.i0e(read)) + read.abs())


def softplus_from(call: Call, _: Any) -> Shadow | None:
    """Return the shadow of softplus, which is the exponential of its argument far below 0."""
    read, beta = call.read, call.argument(1, "beta", 1)
    if read is None or not read.is_floating_point() or beta != 1:
        return None

    def log() -> Tensor:
        far = read < _AS_EXPONENTIAL
        near = functional.softplus(torch.where(far, torch.zeros_like(read), read)).log()
        return torch.where(far, read, near)

    return Shadow(log)


def cosh_from(call: Call, _: Any) -> Shadow | None:
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    return Shadow(lambda: read + functional.softplus(-2 * read) - math.log(2.0))


def expm1_from(call: Call, _: Any) -> Shadow | None:
    """Return the shadow of exp(x) - 1, which is positive where x is."""
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    return Shadow(lambda: read + _log_of_rest(-read))


def exp_from(call: Call, _: Any) -> Shadow | None:
    read = call.read
    if read is None or not read.is_floating_point():
        return None
    return Shadow(lambda: read, lambda: _log_of_rest(read))


def _log_of_rest(log: Tensor) -> Tensor:
    """Return log(1 - exp(log)): by expm1 near 0, by log1p elsewhere. Never of the masked side."""
    near = log > -math.log(2.0)
    small = torch.where(near, log, torch.full_like(log, -0.5))
    large = torch.where(near, torch.full_like(log, -2.0), log)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
