"""An update that the device itself leaves out where the window that it is of is bad.

To know before the update whether its gradients are finite, the host has to wait for all that the
device was given, and launches nothing meanwhile: 5 ms of a step of 170 on an H100. The fused
optimizers of torch take a flag that they read on the device (``found_inf``, by which
``torch.amp.GradScaler`` skips their updates): so they are launched at once, and the host reads the
same values a moment later, while the device is at the update. Weights, moments and step counts of
an update that was left out so are as before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.detect.sentinel import LateReading, Reading
from nanstop.numerics.trained import held_by
from nanstop.replay.untouched import Versions

_FLAGS = ("grad_scale", "found_inf")


class GatedUpdate:
    """The update of one window. ``norm``: what its gradients are to be clipped by: 0, which leaves
    them as they are, where the window is bad. ``is_left_out``: known once it was read.
    """

    def __init__(self, optimizer: Optimizer, losses: Sequence[Tensor], norm: Tensor) -> None:
        self.optimizer = optimizer
        self._late = LateReading(losses, norm)
        self.norm = torch.where(self._late.is_bad.bool(), torch.zeros_like(norm), norm)
        self._versions: Versions | None = None
        self.is_left_out = False

    def begin(self) -> None:
        """Have the step that the optimizer makes next take the flag. No synchronisation."""
        self._versions = Versions(held_by(self.optimizer))
        vars(self.optimizer).update(grad_scale=None, found_inf=self._late.is_bad)

    def end(self) -> None:
        """Take the flag off the optimizer."""
        for name in _FLAGS:
            vars(self.optimizer).pop(name, None)

    def read(self) -> Reading:
        """Return what the window gave; wait for that, not for the update. Weights that it has left
        as they were are at their versions.
        """
        reading = self._late.read()
        self.is_left_out = not reading.quiet
        if self.is_left_out and self._versions is not None:
            self._versions.put_back()
        return reading


def can_be_gated(optimizer: Optimizer, norm: Tensor) -> bool:
    """Return whether an optimizer takes the flag on the device (see ``GradScaler.step``), is given
    none yet, has its state (the first update of the fused SGD would leave memory unwritten), and
    calls nothing of the script's after an update: a hook would be told of one that was not made.
    """
    return (
        is_asynchronous(norm.device)
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
        and not optimizer._optimizer_step_post_hooks
        and not any(name in vars(optimizer) for name in _FLAGS)
        and all(p in optimizer.state for p in held_by(optimizer) if p.grad is not None)
    )


def is_asynchronous(device: torch.device) -> bool:
    """Return whether what a device is given is done while the host goes on."""
    return device.type != "cpu"
