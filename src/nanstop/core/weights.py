"""Of the weights of a model: their formats, and which are not finite or larger than any training makes them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nanstop.core.numerics import floats, measure
from nanstop.records import ParamGroup, TensorStats

HUGE = 2.0**20
"""Weights are of the order of 1; biases and norms of published models stay below 2**12."""
MAX_LISTED = 64


@torch.no_grad()
def odd_weights(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorStats, ...]:
    """Return the range of each tensor that holds a NaN, an Inf or a value beyond ``HUGE``, MAX_LISTED at most.

    Reads every value once. Synchronises the device once, and once more for each tensor that is returned.
    """
    known = [(name, tensor, part) for name, tensor in named for part in floats(tensor)]
    if not known:
        return ()
    ends = [torch.stack(part.aminmax()) for _, _, part in known]  # NaN if any value is
    largest = torch.stack([pair.abs().amax().float().to(ends[0].device) for pair in ends]).tolist()
    odd = {
        name: tensor
        for (name, tensor, _), value in zip(known, largest, strict=True)
        if not value <= HUGE
    }
    return tuple(measure(tensor, name) for name, tensor in list(odd.items())[:MAX_LISTED])


def param_groups(named: Iterable[tuple[str, Tensor]]) -> tuple[ParamGroup, ...]:
    """Return how many parameters there are of each format, trainable and frozen. Reads no values."""
    groups: dict[tuple[str, bool], list[tuple[str, Tensor]]] = {}
    for name, parameter in named:
        key = str(parameter.dtype).removeprefix("torch."), parameter.requires_grad
        groups.setdefault(key, []).append((name, parameter))
    return tuple(
        ParamGroup(
            dtype=dtype,
            trainable=trainable,
            num_tensors=len(members),
            num_elements=sum(p.numel() for _, p in members),
            examples=tuple(name for name, _ in members[:4]),
        )
        for (dtype, trainable), members in groups.items()
    )
