"""How near two runs of one step are: their losses and the gradient of every parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from nanstop.numerics.tensors import in_float64
from nanstop.replay.rerun import Attempt

SAME = 1e-4
"""Distance of what is the same to float32 rounding."""

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
        a, b = _flat(first, name, second), _flat(second, name, first)
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
        a, b = _flat(gradients, name, exact), _flat(exact, name, gradients)
        gaps.append(float(torch.linalg.vector_norm(a - b)))
        norms.append(float(torch.linalg.vector_norm(b)))
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


def _flat(own: Mapping[str, Tensor], name: str, other: Mapping[str, Tensor]) -> Tensor:
    """Return a gradient in one dimension, in float64 on the host;
    zeros of the other's size where it is missing.
    """
    if name in own:
        return in_float64(own[name]).flatten().cpu()
    return torch.zeros(other[name].numel(), dtype=torch.float64)
