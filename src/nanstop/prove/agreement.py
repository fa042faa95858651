"""How near two runs of one step are: their losses and the gradient of every parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from nanstop.numerics.tensors import in_float64
from nanstop.replay.rerun import Attempt

SAME = 1e-4
"""Distance of what is the same to float32 rounding."""

_PIECE = 2**22

_SMALL = 0.1
"""Share of the largest gradient's norm below which a parameter's own norm is no measure:
its digits are all rounding.
"""


def loss_gap(loss: float, exact: float) -> float:
    """Return the distance of a loss to the exact one, over its magnitude."""
    return abs(loss - exact) / max(abs(exact), 1e-3)


def cosine(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """Return the cosine between two sets of gradients by parameter name, in float64;
    1.0 if both are zero.

    A gradient that only one of them has counts as zero in the other. Synchronises the device.
    """
    dot = norm_first = norm_second = 0.0
    for name in dict.fromkeys((*first, *second)):  # in an order that no hash seed moves
        for a, b in _pieces(first, second, name):
            dot += float(a @ b)
            norm_first += float(a @ a)
            norm_second += float(b @ b)
    if norm_first == 0.0 and norm_second == 0.0:
        return 1.0
    scale = math.sqrt(norm_first) * math.sqrt(norm_second)
    return dot / scale if scale > 0 else 0.0


def largest_gap(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the distance of one parameter's gradient to the exact one, over its norm:
    the largest of all parameters.

    A direction alone would not tell a gradient from a thousand times itself, nor a sum over all
    parameters one that is missing where others are large. Zero for equal gradients. In float64;
    synchronises the device.
    """
    gaps, norms = [], []
    for name in dict.fromkeys((*gradients, *exact)):
        pieces = list(map(_gap_and_norm, _pieces(gradients, exact, name)))
        gaps.append(math.hypot(*(gap for gap, _ in pieces)))
        norms.append(math.hypot(*(norm for _, norm in pieces)))
    least = _SMALL * max(norms, default=0.0)
    return max(
        (_over(gap, max(norm, least)) for gap, norm in zip(gaps, norms, strict=True)), default=0.0
    )


def agree(plain: Attempt, cured: Attempt) -> bool:
    """Return whether two finite runs have the same loss and gradients, to float32 rounding."""
    if plain.failed or plain.loss is None or cured.loss is None:
        return False
    first, second = plain.grads or {}, cured.grads or {}
    return loss_gap(cured.loss, plain.loss) <= SAME and largest_gap(second, first) <= SAME


def _over(gap: float, norm: float) -> float:
    if gap == 0.0:
        return 0.0
    return gap / norm if norm > 0.0 else math.inf


def _gap_and_norm(piece: tuple[Tensor, Tensor]) -> tuple[float, float]:
    own, exact = piece
    norm = torch.linalg.vector_norm
    return float(norm(own - exact)), float(norm(exact))


def _pieces(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a gradient of two sets in parts, in one dimension and in float64 on the host; zeros
    where one has none. All of it at once would be many times the gradient.
    """
    found = [one[name].flatten() if name in one else None for one in (first, second)]
    for start in range(0, max(one.numel() for one in found if one is not None), _PIECE):
        parts = [one[start : start + _PIECE] if one is not None else None for one in found]
        like = next(part for part in parts if part is not None)
        zeros = torch.zeros(like.shape, dtype=torch.float64)
        own, other = (zeros if part is None else in_float64(part).cpu() for part in parts)
        yield own, other
