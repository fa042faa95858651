"""Of the weights of a model: their formats, and which are not finite or larger than any training
makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import floats, format_name, is_measurable, measure, spread
from nanstop.records import ParamGroup, StepLength, StepPerRate, TensorStats

HUGE = 2.0**20
"""Weights are of the order of 1; biases and norms of published models stay below 2**12."""
MAX_LISTED = 64
SIGNAL = 0.03
"""Least size of a weight, times the root of how many are added up in an output:
of initialisations in use 0.1 to 1.4.

What is smaller starts next to nothing on purpose (zeros, tables of features):
its size says nothing of what it becomes.
"""
_MOST_TENSORS, _MOST_ELEMENTS = 256, 4096


@torch.no_grad()
def odd_weights(named: Iterable[tuple[str, Tensor]]) -> tuple[TensorStats, ...]:
    """Return the range of each tensor that holds a NaN, an Inf or a value beyond ``HUGE``,
    MAX_LISTED at most.

    Reads every value once (0.2 ns each on one core). Synchronises the device once, and once more
    for each tensor that is returned.
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
    """Return how many parameters there are of each format, trainable and frozen.
    Reads no values.
    """
    groups: dict[tuple[str, bool], list[tuple[str, Tensor]]] = {}
    for name, parameter in named:
        key = format_name(parameter.dtype), parameter.requires_grad
        groups.setdefault(key, []).append((name, parameter))
    return tuple(
        ParamGroup(
            dtype=dtype,
            trainable=trainable,
            num_tensors=len(members),
            num_elements=sum(_num_elements(p) for _, p in members),
            examples=tuple(name for name, _ in members[:4]),
        )
        for (dtype, trainable), members in groups.items()
    )


def _num_elements(parameter: Tensor) -> int:
    """Return the size of a parameter; ZeRO-3 leaves one that is not in use empty, and notes it."""
    return getattr(parameter, "ds_numel", parameter.numel())


@torch.no_grad()
def longest_step(per_rate: StepPerRate, groups: Sequence[Mapping[str, Any]]) -> StepLength | None:
    """Return the group of parameters whose step is the longest beside its weights.

    ``groups``: of an optimizer that takes such steps. A group's weights are its matrices: of 256 at
    most, 4096 elements each. None where no weight has a size to compare. Synchronises once a group
    and device.
    """
    found: list[StepLength] = []
    for group in groups:
        rate, weight = group.get("lr"), _typical(group["params"])
        if rate is None or weight is None:
            continue
        length = float(rate) * per_rate.length * (weight if per_rate.relative else 1.0)
        found.append(StepLength(lr=float(rate), length=length, weight=weight))
    return max(found, key=lambda step: step.length / step.weight, default=None)


@torch.no_grad()
def taken_step(
    parameters: Sequence[Tensor],
    lr: float,
    num_updates: int,
    rewound: Callable[[], AbstractContextManager[Any]],
) -> StepLength | None:
    """Return how far each of the last updates has moved weights on average, beside what they were
    before these.

    ``rewound``: has the weights be what they were inside. Of as many elements as ``longest_step``
    reads; a number that is not finite counts as none. Synchronises once each time.
    """
    held = _matrices(parameters)
    now = [spread(p, _MOST_ELEMENTS).float().clone() for p in held]
    with rewound():
        weight = _typical(parameters)
        before = [spread(p, _MOST_ELEMENTS).float() for p in held]
        moved = [
            (new - old).nan_to_num(0.0, 0.0, 0.0) for new, old in zip(now, before, strict=True)
        ]
        length = _median(_sizes(moved), held, least=0.0)
    if weight is None or length is None:
        return None
    return StepLength(lr=lr, length=length / num_updates, weight=weight)


def _matrices(parameters: Iterable[Tensor]) -> list[Tensor]:
    held = [p for p in parameters if p.dim() > 1 and p.is_floating_point() and is_measurable(p)]
    return held[:: -(-len(held) // _MOST_TENSORS)] if held else []


def _sizes(samples: Iterable[Tensor]) -> list[float]:
    """Return the root mean square of each sample of elements."""
    found = [sample.float().square().mean().sqrt().cpu() for sample in samples]
    return torch.stack(found).tolist() if found else []


def _typical(parameters: Iterable[Tensor]) -> float | None:
    """Return the median over all elements of their tensor's root mean square."""
    held = _matrices(parameters)
    return _median(_sizes(spread(p, _MOST_ELEMENTS) for p in held), held)


def _median(sizes: Sequence[float], held: Sequence[Tensor], least: float = SIGNAL) -> float | None:
    """Return the median size over all elements, None where none has a size to compare: ``least``,
    times the root of how many are added up.
    """
    rows = [
        (size, parameter.numel())
        for size, parameter in zip(sizes, held, strict=True)
        if size * (parameter.numel() / len(parameter)) ** 0.5 >= least
    ]
    left = sum(number for _, number in rows) / 2
    for size, number in sorted(rows):
        left -= number
        if left <= 0:
            return size
    return None
