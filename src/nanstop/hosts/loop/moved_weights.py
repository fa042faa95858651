"""Weights that a loop changes between a backward and the update.

Noise that is taken off again, a step up and back.

A replay has the weights of the update, not those of the forward. What fails there all the same is
found; what comes out clean proves nothing, and gradients made anew would be those of other weights.
"""

from __future__ import annotations

from torch import Tensor

from nanstop.hosts.loop.step import LoopStep
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.numerics.tensors import nonfinite

_MOVED = (
    "the weights were changed after the backward, "
    "and with those that there are now it does not fail"
)


def has_moved(step: LoopStep, norm: Tensor | None) -> bool:
    """Return whether weights were changed since a backward of the window.

    One that has failed is run again then, undone: where it comes out clean, it counts as not
    replayable from here on. That synchronises the device.
    """
    moved = micros_moved(step)
    if moved and _is_bad(step, norm) and not step.obstacle() and not _comes_back(step):
        moved[0].tape.problem = _MOVED
    return bool(moved)


def micros_moved(step: LoopStep) -> list[TapedMicro]:
    """Return the micro-batches since whose backward weights were changed. No device work."""
    taped = (micro for micro in step.micros if isinstance(micro, TapedMicro))
    return [micro for micro in taped if micro.has_moved()]


def _is_bad(step: LoopStep, norm: Tensor | None) -> bool:
    return bool(nonfinite({str(i): value for i, value in enumerate((*step.losses, norm))}))


def _comes_back(step: LoopStep) -> bool:
    from nanstop.replay.rerun import attempt  # a healthy run has no use for it

    return any(attempt(step, micro).failed for micro in range(len(step.micros)))
