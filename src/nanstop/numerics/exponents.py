"""How the values of a tensor are spread over powers of two."""

from __future__ import annotations

import torch
from torch import Tensor

from nanstop.numerics.tensors import is_measurable, spread

MOST = 2**20
"""Values that are counted."""


@torch.no_grad()
def exponent_counts(tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Return (e, how many) of the finite values other than 0 with 2^e <= size < 2^(e+1), by e.

    Of a large tensor up to ``MOST`` evenly spread values are counted. Empty for what holds no
    floating-point numbers that can be read. Synchronises the device.
    """
    if not tensor.is_floating_point() or not is_measurable(tensor) or tensor.numel() == 0:
        return ()
    few = spread(tensor, MOST)
    size = (few if few.dtype is torch.float64 else few.float()).abs()
    _, above = torch.frexp(size[torch.isfinite(size) & (size > 0)])
    exponents, counts = torch.unique(above - 1, return_counts=True)
    return tuple(zip(exponents.tolist(), counts.tolist(), strict=True))
