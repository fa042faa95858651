"""An update that the device itself leaves out where the window that it is of is bad.

To know before the update whether its gradients are finite, the host has to wait for all that the
device was given, and launches nothing meanwhile: 5 ms of a step of 170 on an H100. The fused
optimizers of torch take a flag that they read on the device (``found_inf``, by which
``torch.amp.GradScaler`` skips their updates): so they are launched at once, and the host reads the
same values a moment later, while the device is at the update. Weights, moments and step counts of
an update that was left out so are as before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.detect.sentinel import LateReading, Reading
from nanstop.hosts.loop.step import LoopStep
from nanstop.numerics.trained import held_by
from nanstop.replay.untouched import Versions

_FLAGS = ("grad_scale", "found_inf")
WAITED_FOR = frozenset({"cuda"})
"""Types of devices that work while the host goes on, of those on which this was tried."""


class GatedUpdate:
    """The update of one window, ``step``. ``norm``: what its gradients are to be clipped by: 0,
    which leaves them as they are, where the window is bad. ``is_launched``: the device has it.
    ``is_bad``: known once the window was read; what was launched is left out then.
    """

    def __init__(self, step: LoopStep, norm: Tensor) -> None:
        optimizer = step.view.optimizer
        assert optimizer is not None
        self.step, self._optimizer = step, optimizer
        self._late = LateReading([loss for loss in step.losses if loss is not None], norm)
        self.norm = torch.where(self._late.is_bad.bool(), torch.zeros_like(norm), norm)
        self._versions: Versions | None = None
        self.is_launched = self.is_bad = False

    def begin(self) -> None:
        """Have the step that the optimizer makes next take the flag. No synchronisation."""
        self.is_launched = True
        self._versions = Versions(held_by(self._optimizer))
        vars(self._optimizer).update(grad_scale=None, found_inf=self._late.is_bad)

    def end(self) -> None:
        """Take the flag off the optimizer."""
        for name in _FLAGS:
            vars(self._optimizer).pop(name, None)

    def read(self) -> Reading:
        """Return what the window gave; wait for that, not for the update. Weights that it has left
        as they were are at their versions.
        """
        reading = self._late.read()
        self.is_bad = not reading.quiet
        if self.is_bad and self._versions is not None:
            self._versions.put_back()
        return reading


def can_be_gated(optimizer: Optimizer | None, norm: Tensor | None) -> bool:
    """Return whether an optimizer takes the flag on the device (see ``GradScaler.step``), is given
    none yet, has its state (the first update of the fused SGD would leave memory unwritten), and
    calls nothing of the script's after an update: a hook would be told of one that was not made.
    """
    return (
        norm is not None
        and norm.device.type in WAITED_FOR
        and optimizer is not None
        and getattr(optimizer, "_step_supports_amp_scaling", False)
        and all(group.get("fused") for group in optimizer.param_groups)
        and not optimizer._optimizer_step_post_hooks
        and not any(name in vars(optimizer) for name in _FLAGS)
        and all(p in optimizer.state for p in held_by(optimizer) if p.grad is not None)
    )
