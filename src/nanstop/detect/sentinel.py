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


class LateReading:
    """A window's values on their way to the host, which goes on to launch what comes next.

    ``losses``, ``norm``: as ``read_window`` takes them. ``is_bad``: float32 scalar on the device of
    ``norm``, 1 where one of them is not finite, else 0. No synchronisation.
    """

    def __init__(self, losses: Sequence[Tensor], norm: Tensor) -> None:
        values = _stacked(_here(losses, norm), norm.device)
        self._num_losses = len(losses)
        self.is_bad = values.isfinite().all().logical_not().float()
        self._arrived: Any = None
        if values.device.type == "cpu":
            self._values = values
            return
        self._values = torch.empty_like(values, device="cpu", pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._arrived = torch.get_device_module(values.device).Event()
        self._arrived.record()

    def read(self) -> Reading:
        """Return the values. Waits for what the device had been given before they were copied, and
        for nothing that it was given since.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        values = self._values.tolist()
        return Reading(losses=tuple(values[: self._num_losses]), norm=values[-1])


def read_window(
    losses: Sequence[Tensor], norm: Tensor, found_inf: Sequence[Tensor] = ()
) -> Reading:
    """Return the window's values with a single device synchronisation.

    ``losses``: scalars, any float dtype. ``norm``: scalar.
    ``found_inf``: the scaler's scalar flags, one a device.
    Of one that several processes hold, this rank's part is read: no other takes part.
    """
    scalars, num_losses = _here(losses, norm, *found_inf), len(losses)
    values = _values(scalars, norm.device)
    return Reading(
        losses=tuple(values[:num_losses]),
        norm=values[num_losses],
        found_inf=any(values[num_losses + 1 :]),
    )


def _here(losses: Sequence[Tensor], *others: Tensor) -> list[Tensor]:
    return [
        one if type(one) is Tensor else next(iter(dense_parts(one)), one)
        for one in (*losses, *others)
    ]


def _values(scalars: Sequence[Tensor], device: torch.device) -> list[float]:
    if {one.device.type for one in scalars} == {"cpu"}:
        return [one.item() for one in scalars]  # there is nothing to wait for
    return _stacked(scalars, device).tolist()


def _stacked(scalars: Sequence[Tensor], device: torch.device) -> Tensor:
    # A finite loss in float64 may be beyond float32; not every device has float64.
    wide = torch.float64 if torch.float64 in [s.dtype for s in scalars] else torch.float32
    return torch.stack([s.detach().to(device, wide).reshape(()) for s in scalars])


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
