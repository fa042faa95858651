"""How near two runs of one step are: their losses and the gradient of every parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from nanstop.errors import ShortOfMemoryError
from nanstop.numerics.host_memory import lacks_memory
from nanstop.numerics.room import let_go
from nanstop.numerics.tensors import has_float64
from nanstop.replay.rerun import Attempt

Gaps = tuple[float, float, float]
"""Distance of a loss, cosine of the gradients, distance of the worst gradient."""

SAME = 1e-4
"""Distance of what is the same to float32 rounding."""

_PIECE, _PIECE_ON_HOST = 2**22, 2**18
"""Elements that are compared at a time: of a device each piece is waited for, of a full host each
is much.
"""

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
    return nearness(first, second)[0]


def largest_gap(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the distance of one parameter's gradient to the exact one, over its norm:
    the largest of all parameters.

    A direction alone would not tell a gradient from a thousand times itself, nor a sum over all
    parameters one that is missing where others are large. Zero for equal gradients. In float64;
    synchronises the device.
    """
    return nearness(gradients, exact)[1]


def nearness(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return the cosine between two sets of gradients, and the largest gap of one of them. Each
    gradient is asked for once: those that wait in host memory are long on the way.
    """
    dot = norm_first = norm_second = 0.0
    gaps, norms = [], []
    for name in dict.fromkeys((*gradients, *exact)):  # in an order that no hash seed moves
        gap = norm = 0.0
        for a, b in _pieces(gradients, exact, name):
            dot += float(a @ b)
            norm_first += float(a @ a)
            size = float(b @ b)
            norm_second += size
            norm = math.hypot(norm, math.sqrt(size))
            gap = math.hypot(gap, float(torch.linalg.vector_norm(a - b)))
        gaps.append(gap)
        norms.append(norm)
    least = _SMALL * max(norms, default=0.0)
    ratios = (_over(gap, max(norm, least)) for gap, norm in zip(gaps, norms, strict=True))
    near = 1.0
    if norm_first or norm_second:
        scale = math.sqrt(norm_first) * math.sqrt(norm_second)
        near = dot / scale if scale > 0 else 0.0
    return near, max(ratios, default=0.0)


def agree(plain: Attempt, cured: Attempt) -> bool:
    """Return whether two finite runs have the same loss and gradients, to float32 rounding."""
    if plain.failed or plain.loss is None or cured.loss is None:
        return False
    first, second = plain.grads or {}, cured.grads or {}
    return loss_gap(cured.loss, plain.loss) <= SAME and largest_gap(second, first) <= SAME


def gaps_between(run: Attempt, exact: Attempt) -> Gaps | None:
    """Return how far a run is from another one; None where either failed or has no loss.

    Errors: ``ShortOfMemoryError`` where there is no room to compare them.
    """
    if run.failed or exact.failed or run.loss is None or exact.loss is None:
        return None
    own, true = run.grads or {}, exact.grads or {}
    try:
        return loss_gap(run.loss, exact.loss), *nearness(own, true)
    except Exception as error:
        if not lacks_memory(error):
            raise
        let_go(error)
        raise ShortOfMemoryError from None


def farthest(all_gaps: Sequence[Gaps]) -> Gaps | None:
    """Return the largest loss gap, the smallest cosine and the largest gradient gap of some runs;
    None where there are none.
    """
    if not all_gaps:
        return None
    losses, cosines, gradients = zip(*all_gaps, strict=True)
    return max(losses), min(cosines), max(gradients)


def _over(gap: float, norm: float) -> float:
    if gap == 0.0:
        return 0.0
    return gap / norm if norm > 0.0 else math.inf


def _pieces(
    first: Mapping[str, Tensor], second: Mapping[str, Tensor], name: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a gradient of two sets in parts, in one dimension and in float64; zeros where one has
    none. All of it at once would be many times the gradient.
    """
    found = [_in_a_row(one[name]) if name in one else None for one in (first, second)]
    place = _place([one.device for one in found if one is not None])
    num = _PIECE_ON_HOST if place.type == "cpu" else _PIECE
    for start in range(0, max(one.numel() for one in found if one is not None), num):
        parts = [one[start : start + num] if one is not None else None for one in found]
        like = next(part for part in parts if part is not None)
        zeros = torch.zeros(like.shape, dtype=torch.float64, device=place)
        own, other = (zeros if part is None else part.to(place).double() for part in parts)
        yield own, other


def _in_a_row(gradient: Tensor) -> Tensor:
    """Return a gradient in one dimension: of a sparse one, as large as its weight is."""
    return (gradient if gradient.layout is torch.strided else gradient.to_dense()).flatten()


def _place(devices: Sequence[torch.device]) -> torch.device:
    """Return where tensors of these devices are compared: where one of them is computed, for the
    way to the host is slow, or on the host where a device has no float64.
    """
    away = [device for device in devices if device.type != "cpu"]
    if away and all(device == away[0] for device in away) and has_float64(away[0]):
        return away[0]
    return torch.device("cpu")
