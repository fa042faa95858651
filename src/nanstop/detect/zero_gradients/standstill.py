"""Whether gradients that are exactly 0, update after update, would be so whatever the weights are.

A loss that is at its least has none either, and gets one with the next batch that is not fitted: a
value network of zeros before the first reward. Advantages that are all 0, or a mask that is, take
the gradient away at every point. One experiment tells them apart: a micro-batch run again, undone,
with other weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanstop.detect.other_weights import moved
from nanstop.numerics.tensors import floats

if TYPE_CHECKING:
    from nanstop.records import RunFacts
    from nanstop.replay.step import Step

ELSEWHERE = "grad_elsewhere"
"""The series that holds what was found: the largest gradient with other weights."""


class Standstill:
    """Counts updates without any gradient.
    The experiment is made after 4 in a row, after 16, 64, and so on.
    """

    def __init__(self) -> None:
        self.num_zero = 0
        """Updates in a row: of several optimizers a step has several."""
        self.until: int | None = None
        """The step of the last other one; None where there was none in this training."""
        self._step = 0

    def note(self, norm: object, step: int) -> None:
        """Note the norm of a healthy window's gradients; None where it is not known."""
        if step < self._step:  # another training has begun
            self.num_zero, self.until = 0, None
        self._step = step
        if norm == 0.0:
            self.num_zero += 1
        else:
            self.num_zero, self.until = 0, step

    def due(self, facts: RunFacts) -> bool:
        """Return whether this window should be run again with other weights."""
        number = self.num_zero
        power_of_4 = number & (number - 1) == 0 and number.bit_length() % 2 == 1
        return number >= 4 and power_of_4 and facts.world_size == 1 and facts.veto == "yes"

    def take(self, step: Step) -> float:
        """Return the largest gradient of a micro-batch with other weights;
        NaN where none was moved.

        Undone bitwise: the weights' own storages are put back.
        Raises what the step raises. Synchronises the device.
        """
        trained = [p for p in step.view.root.parameters() if p.requires_grad]
        with step.isolated(), moved(trained) as num_moved, torch.enable_grad():
            step.run(0)
            found = [part for p in trained if p.grad is not None for part in floats(p.grad)]
            sizes = [max(-float(low), float(high)) for low, high in map(torch.aminmax, found)]
        return max(sizes, default=0.0) if num_moved else float("nan")
