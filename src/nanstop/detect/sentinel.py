"""The always-on flag: one host read a window over its losses and the norm that clipping computes
anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from nanstop.frozen import frozen
from nanstop.numerics.tensors import dense_parts, floats
from nanstop.numerics.trained import gradients_held
from nanstop.records import GradientTally

_IS_SPARSE = attrgetter("is_sparse")


@frozen
class Reading:
    """What one window gave, on the host:
    each micro-batch's raw loss, the gradient norm, what the scaler found.
    """

    losses: tuple[float, ...]
    norm: float
    found_inf: bool = False

    @property
    def bad_losses(self) -> tuple[int, ...]:
        """Return the positions of losses that are not finite."""
        if all(map(math.isfinite, self.losses)):
            return ()
        return tuple(i for i, loss in enumerate(self.losses) if not math.isfinite(loss))

    @property
    def quiet(self) -> bool:
        """Whether every loss and the norm are finite and no scaler found an infinity."""
        finite = math.isfinite(self.norm) and all(map(math.isfinite, self.losses))
        return finite and not self.found_inf


def read_window(
    losses: Sequence[Tensor], norm: Tensor, found_inf: Sequence[Tensor] = ()
) -> Reading:
    """Return the window's values with a single device synchronisation.

    ``losses``: scalars, any float dtype. ``norm``: scalar.
    ``found_inf``: the scaler's scalar flags, one a device.
    Of one that several processes hold, this rank's part is read: no other takes part.
    """
    scalars = [
        one if type(one) is Tensor else next(iter(dense_parts(one)), one)
        for one in (*losses, norm, *found_inf)
    ]
    values, num_losses = _values(scalars, norm.device), len(losses)
    return Reading(
        losses=tuple(values[:num_losses]),
        norm=values[num_losses],
        found_inf=any(values[num_losses + 1 :]),
    )


def _values(scalars: Sequence[Tensor], device: torch.device) -> list[float]:
    if {one.device.type for one in scalars} == {"cpu"}:
        return [one.item() for one in scalars]  # there is nothing to wait for
    # A finite loss in float64 may be beyond float32; not every device has float64.
    wide = torch.float64 if torch.float64 in [s.dtype for s in scalars] else torch.float32
    return torch.stack([s.detach().to(device, wide).reshape(()) for s in scalars]).tolist()


def total_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm that ``torch.nn.utils.clip_grad_norm_`` would compute, bitwise, and change
    nothing.

    Of sparse gradients it is that of their values.
    """
    return norm_of_gradients(gradients_held(parameters), norm_type)


def norm_of_gradients(
    gradients: Sequence[Tensor], norm_type: float = 2.0, foreach: bool | None = None
) -> Tensor:
    """Return the norm of some gradients, as ``total_norm`` does."""
    dense = gradients
    if any(map(_IS_SPARSE, gradients)):
        dense = [g._values() if g.is_sparse else g for g in gradients]
    return torch.nn.utils.get_total_norm(dense, norm_type, foreach=foreach)


def norm_here(parameters: Iterable[Tensor]) -> Tensor | None:
    """Return the norm of what this process has of gradients, None without any: of one that lies on
    several, the norm itself would make all of them meet.
    """
    with torch.no_grad():
        given: list[Any] = gradients_held(parameters)
        held = [one.to_local() if hasattr(one, "to_local") else one for one in given]
        return norm_of_gradients(held) if held else None


def tally_gradients(gradients: Iterable[Tensor | None]) -> GradientTally:
    """Return how many gradients there are, and how many are not finite or zero throughout.

    Of a sharded gradient this rank's part is looked at.
    Reads each once and synchronises once a device.
    """
    held: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        for values in floats(gradient) if gradient is not None and gradient.numel() else ():
            flags = (values.isfinite().all(), values.isinf().any(), values.any())
            held.setdefault(values.device, []).append(torch.stack(flags))
    rows = [row for flags in held.values() for row in torch.stack(flags).tolist()]
    return GradientTally(
        num_total=len(rows),
        num_bad=sum(not finite for finite, _, _ in rows),
        num_inf=sum(infinite for _, infinite, _ in rows),
        num_zero=sum(not nonzero for _, _, nonzero in rows),
    )
