"""Exponentials times what has a sign: their sums are kept as a number times an exponential, so that
a weighted mean never makes the exponential itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanstop.remedies.forms.calls import Call
from nanstop.remedies.forms.logs.shadows import Shadow

WEIGHTED = ("sum", "div", "cumsum", "mul")
"""Calls that know what to do with such a number."""


def product(call: Call, shadows: list[Shadow | None]) -> Shadow | None:
    """Return what follows an exponential times any tensor, or times what is one itself."""
    first, second = [*shadows, None, None][:2]
    if first is not None and second is not None:
        return _of_two(first, second)
    given = ((first, call.argument(1, "other")), (second, call.argument(0, "input")))
    known = [(shadow, other) for shadow, other in given if shadow is not None]
    if len(known) != 1:
        return None
    ((shadow, other),) = known
    if not isinstance(other, Tensor) or not other.is_floating_point():
        return None
    own = shadow.factor
    return Shadow(shadow.log, factor=lambda: other if own is None else own() * other)


def _of_two(first: Shadow, second: Shadow) -> Shadow | None:
    own, other = first.factor, second.factor
    factor = own or other
    if factor is None:
        return None
    both = (lambda: own() * other()) if own is not None and other is not None else factor
    return Shadow(lambda: first.log() + second.log(), factor=both)


def number(shadow: Shadow) -> Tensor:
    """Return the number that a shadow stands for."""
    exponential = torch.exp(shadow.log())
    return exponential if shadow.factor is None else shadow.factor() * exponential


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


def running_sum(shadow: Shadow, dim: int) -> Shadow | None:
    """Return what follows a running sum of exponentials times what has a sign: at each place less
    the largest so far, joined over distances 1, 2, 4, ... (Hillis and Steele, "Data parallel
    algorithms", 1986), for one largest number would round away all that came long before it.
    """
    factor, kept = shadow.factor, list[tuple[Tensor, Tensor]]()
    if factor is None:
        return None

    def scanned() -> tuple[Tensor, Tensor]:
        if not kept:
            log, weights = torch.broadcast_tensors(shadow.log(), factor())
            kept.append(_scanned(log, weights, dim))
        return kept[0]

    return Shadow(lambda: scanned()[0], factor=lambda: scanned()[1])


def _scanned(log: Tensor, weights: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    largest = log.detach()
    sums, size, distance = weights * _share(log, largest), log.shape[dim], 1
    while distance < size:
        left = size - distance
        before, others = (
            torch.cat(
                [torch.full_like(one.narrow(dim, 0, distance), start), one.narrow(dim, 0, left)],
                dim,
            )
            for one, start in ((largest, -torch.inf), (sums, 0.0))
        )
        reached = torch.maximum(largest, before)
        sums = sums * _share(largest, reached) + others * _share(before, reached)
        largest, distance = reached, 2 * distance
    return largest, sums


def _share(log: Tensor, largest: Tensor) -> Tensor:
    return torch.exp(log - largest.masked_fill(largest == -torch.inf, 0.0))


def quotient(shadows: list[Shadow | None]) -> Tensor | None:
    """Return a weighted sum of exponentials over a sum of such."""
    above, below = [*shadows, None, None][:2]
    if above is None or above.factor is None or below is None or below.factor is not None:
        return None
    return above.factor() * torch.exp(above.log() - below.log())


def _largest(log: Tensor, dim: Any, *, keep: bool) -> Tensor:
    largest = log.detach().amax(dim, keep)
    return largest.masked_fill(largest == -torch.inf, 0.0)
