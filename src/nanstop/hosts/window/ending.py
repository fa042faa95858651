"""How a window ended, and what is told of one that was run again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanstop.decide.decision import Decision
from nanstop.detect.sentinel import Reading
from nanstop.detect.signals import micros_read
from nanstop.frozen import frozen
from nanstop.replay.step import Step


@dataclass(slots=True)
class Ending:
    """How a window ends.

    ``apply``: its update may be applied. ``redone``: its gradients were made anew.
    ``failed``: it was found bad, whatever was done about it. ``reading``: the last one of it.
    """

    apply: bool = True
    redone: bool = False
    failed: bool = False
    reading: Reading | None = None

    @property
    def applied(self) -> bool:
        """Whether the update is applied: a scaler that has found an Inf leaves it out itself."""
        return self.apply and not (self.reading is not None and self.reading.found_inf)


@frozen
class Redone:
    """A redo whose result is read at the end of the next window."""

    decision: Decision
    micro: int | None
    before: str


def shown(step: Step, reading: Reading | None, micro: int | None) -> str:
    """Return the loss of a micro-batch, or else the norm of the gradients, as a reading has it."""
    if reading is None:
        return ""
    if micro is not None:
        losses = dict(zip(micros_read(step), reading.losses, strict=False))
        return f"loss {losses[micro]:.6g}" if micro in losses else ""
    if reading.found_inf and math.isfinite(reading.norm):  # a scaler says no more than that
        return "gradients not finite"
    return f"gradient norm {reading.norm:.6g}"
