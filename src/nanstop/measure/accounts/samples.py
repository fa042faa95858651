"""What is copied of gradients and weights from one update to the next: a few elements of some
tensors, as they were at each station.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nanstop.measure.accounts.hook_stations import HookStations
from nanstop.measure.loss_graph import LEAST_SCALE
from nanstop.numerics.tensors import is_measurable, spread
from nanstop.records import SourceLine

MOST_ELEMENTS = 256
"""Of one tensor that are copied."""


@dataclass(slots=True)
class Backward:
    """Samples around one backward. ``is_of_last_loss``: called on the loss of the one before, or on
    one that was made of the same batch.

    ``loss_factor``: by which a mean was multiplied to be its loss, ``most``: the largest of the
    numbers that make it up and are known on the host, ``is_mean``: whether that is all that was
    made of it; ``is_scaled_apart``: whether it is a power of 2, and on the backward's loss alone.
    ``computed``: what ``after`` would be if ``hooks`` had changed nothing, None without any.
    """

    before: Tensor
    after: Tensor
    weights: Tensor
    source: SourceLine | None = None
    is_of_last_loss: bool = False
    reached_others: bool = False
    loss_factor: float | Tensor | None = None
    most: float = 1.0
    is_mean: bool = False
    is_scaled_apart: bool = False
    computed: Tensor | None = None
    hooks: HookStations | None = None

    @property
    def arrived(self) -> Tensor:
        """What autograd has made of the gradients, ahead of any hook."""
        return self.after if self.computed is None else self.computed


@dataclass(slots=True)
class Samples:
    """What is known of one optimizer's gradients from one update to the next: 1-d tensors of one
    length and format, scalars for norms. ``was``, ``became``: weights around the update before;
    ``met``: at the next forward after that; ``left``: gradients when it was over. ``at_sink``:
    those that the first sink finds. ``stages``: the gradient of the first parameter after each
    change of one. ``are_fixed``: of what changed them, whether it does the same in each step.
    """

    backwards: list[Backward] = field(default_factory=list)
    was: Tensor | None = None
    became: Tensor | None = None
    met: Tensor | None = None
    left: Tensor | None = None
    at_sink: Tensor | None = None
    at_unscale: Tensor | None = None
    norm_at_unscale: Tensor | None = None
    scale: Tensor | None = None
    consumed: Tensor | None = None
    weights: Tensor | None = None
    updated: Tensor | None = None
    changed_at: list[SourceLine] = field(default_factory=list)
    called_at: list[SourceLine] = field(default_factory=list)
    overflowed_at: list[SourceLine] = field(default_factory=list)
    norm_consumed: Tensor | None = None
    num_replaced: int = 0
    num_unheld: int = 0
    was_reached: bool = False
    given_rate: float | None = None
    num_at_the_end: int = 0
    num_with_gradient: int | None = None
    stages: list[Tensor] = field(default_factory=list)
    hooked_at: list[SourceLine] = field(default_factory=list)
    are_fixed: list[bool] = field(default_factory=list)
    rewritten_at: list[SourceLine] = field(default_factory=list)
    was_read: bool | None = None
    updated_at: SourceLine | None = None

    @property
    def loss_factor(self) -> float | None:
        """That of all losses of the window, None where they differ or it is not known. That of a
        mean of nothing, 0, says nothing of the others.

        Synchronises a device that it lies on.
        """
        factors = {number_of(one.loss_factor) for one in self.backwards}
        factors = factors - {0.0} or factors
        factor = factors.pop() if len(factors) == 1 else None
        return None if factor is None or math.isnan(factor) else factor

    @property
    def is_scaled(self) -> bool:
        """Whether each loss of the window was multiplied by a number that is no weight."""
        return all(one.most >= LEAST_SCALE for one in self.backwards)

    @property
    def are_written(self) -> bool:
        """Whether the first sink found other gradients than the last backward had left."""
        if self.at_sink is None or not self.backwards:
            return False
        left, found = self.backwards[-1].after, self.at_sink
        return not bool(((left == found) | (left.isnan() & found.isnan())).all())

    @property
    def are_weights_written(self) -> bool:
        """Whether weights were changed between the update before and this one."""
        met = (self.became, self.met, *(one.weights for one in self.backwards), self.weights)
        seen = [one for one in met if one is not None]
        return any(not torch.equal(one, after) for one, after in pairwise(seen))

    @property
    def awaits_forward(self) -> bool:
        """Whether no forward has come yet since an update that was looked at."""
        return self.became is not None and self.met is None

    def settle_hooks(self) -> None:
        """Note the lines of hooks that changed gradients, and forget those that did not.

        Synchronises the device where there were hooks.
        """
        for one in self.backwards:
            hooks, one.hooks = one.hooks, None
            lines = hooks.changed_at() if hooks is not None else None
            if hooks is None or lines is None:
                one.computed = None
            else:
                self.hooked_at += lines
                self.are_fixed.append(hooks.are_fixed)


def on_host(samples: Samples) -> Samples:
    """Return the samples in float64 on the host. Synchronises their device once."""
    places: dict[int, Tensor] = {}

    def collect(value: Any) -> None:
        if isinstance(value, Tensor):
            places[id(value)] = value

    for owner in (samples, *samples.backwards):
        for one in fields(owner):
            collect(getattr(owner, one.name))
    for stage in samples.stages:
        collect(stage)
    vectors = {key: value for key, value in places.items() if value.dim()}
    scalars = {key: value for key, value in places.items() if not value.dim()}
    flat = [*vectors.values(), *(value.reshape(1) for value in scalars.values())]
    if not flat:
        return samples
    read = torch.cat([one.to(flat[0].device, flat[0].dtype) for one in flat]).cpu().double()
    parts = read.split([one.numel() for one in flat])
    host = dict(zip((*vectors, *scalars), parts, strict=True))

    def moved(owner: Any) -> Any:
        names = [one.name for one in fields(owner)]
        given = {name: getattr(owner, name) for name in names}
        return replace(owner, **{n: host[id(v)] for n, v in given.items() if isinstance(v, Tensor)})

    stages = [host[id(stage)] for stage in samples.stages]
    backwards = [moved(one) for one in samples.backwards]
    return replace(moved(samples), backwards=backwards, stages=stages)


def number_of(value: float | Tensor | None) -> float | None:
    return float(value) if value is not None else None


def dense(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient that can be sampled, None for none and for one that cannot."""
    return gradient if gradient is not None and is_measurable(gradient) else None


def sampled_gradient(parameter: Tensor) -> Tensor:
    """Return a sample of a parameter's gradient, zeros where it has none."""
    gradient = dense(parameter.grad)
    return sample_of(parameter if gradient is None else gradient, zero=gradient is None)


def sample_of(tensor: Tensor, *, zero: bool = False) -> Tensor:
    """Return evenly spread elements of a tensor, as a view where it is contiguous."""
    flat = tensor.detach()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    found = spread(flat, MOST_ELEMENTS)
    return torch.zeros_like(found) if zero else found


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return samples as one 1-d tensor, in float64 where one of them is."""
    if not parts:
        return torch.zeros(0)
    wide = torch.float64 if any(p.dtype == torch.float64 for p in parts) else torch.float32
    return torch.cat([part.to(wide) for part in parts])
