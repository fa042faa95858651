"""Exponentials times what has a sign: their sums are kept as a number times an exponential, so that
a weighted mean never makes the exponential itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.shadows import Shadow

WEIGHTED = ("sum", "div")
"""Calls that know what to do with such a number."""


def product(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return what follows an exponential times any tensor."""
    first, second = [*shadows, None, None][:2]
    given = ((first, call.argument(1, "other")), (second, call.argument(0, "input")))
    known = [(shadow, other) for shadow, other in given if shadow is not None]
    if len(known) != 1:
        return None
    ((shadow, other),) = known
    if not isinstance(other, Tensor) or not other.is_floating_point():
        return None
    return Shadow(shadow.log, factor=lambda: other)


def matrix_product(call: Call, shadows: list[Shadow | None], right: Any) -> Shadow | None:
    """Return what follows a matrix of exponentials times any matrix."""
    left = shadows[0]
    is_known = left is not None and shadows[1:] == [None] and isinstance(right, Tensor)
    if left is None or not is_known or call.read is None or min(call.read.dim(), right.dim()) < 2:
        return None
    return Shadow(
        lambda: _largest(left.log(), -1, keep=True),
        factor=lambda: torch.matmul(
            torch.exp(left.log() - _largest(left.log(), -1, keep=True)), right
        ),
    )


def weighted_sum(shadow: Shadow, dim: Any, *, keep: bool) -> Shadow | None:
    """Return what follows a sum of exponentials times what has a sign."""
    factor = shadow.factor
    if factor is None:
        return None

    def parts() -> tuple[Tensor, Tensor, Any]:
        log, weights = torch.broadcast_tensors(shadow.log(), factor())
        return log, weights, tuple(range(log.dim())) if dim is None else dim

    def total() -> Tensor:
        log, weights, dims = parts()
        shares = torch.exp(log - _largest(log, dims, keep=True))
        return (weights * shares).sum(dims, keep)

    def largest() -> Tensor:
        log, _, dims = parts()
        return _largest(log, dims, keep=keep)

    return Shadow(largest, factor=total)


def quotient(shadows: list[Shadow | None]) -> Tensor | None:
    """Return a weighted sum of exponentials over a sum of such."""
    above, below = [*shadows, None, None][:2]
    if above is None or above.factor is None or below is None or below.factor is not None:
        return None
    return above.factor() * torch.exp(above.log() - below.log())


def _largest(log: Tensor, dim: Any, *, keep: bool) -> Tensor:
    largest = log.detach().amax(dim, keep)
    return largest.masked_fill(largest == -torch.inf, 0.0)
