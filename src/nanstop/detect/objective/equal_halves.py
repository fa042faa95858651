"""Whether a batch of pairs compares rows with copies of themselves, so that gradients cancel.

That one half of a batch is a copy of the other is seen in its values; that the objective lives on
the difference, by an experiment: the micro-batch run again, undone, with other rows in one half.
Views of one text that a model is to bring together (SimCSE) are copies as well, and teach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.other_weights import moved
from nanstop.numerics.tensors import floats
from nanstop.records import ObjectiveRow
from nanstop.replay.step import gradients_of

if TYPE_CHECKING:
    from nanstop.replay.step import Batch, Step

LEAST_TIMES = 3
"""Updates in a row: a pair of equals is no fault of all pairs."""
NOTHING = 1e-4
"""Share of a gradient that roundings are."""


class EqualHalves:
    """Follows a run through ``LEAST_TIMES`` updates in a row."""

    def __init__(self) -> None:
        self._num_times = 0
        self.next: int | None = None

    def take(self, step: Step) -> tuple[ObjectiveRow, ...]:
        """Return the rows that the first micro-batch holds twice, once that was so in each of some
        updates, where gradients cancel by it.

        Undone bitwise; runs the micro-batch up to four times then, and not at all elsewhere.
        Synchronises the device where all rows may be there twice.
        """
        batch, self.next = step.batches[0], None
        rows = _twice(batch)
        if not rows:
            return ()
        self._num_times += 1
        if self._num_times < LEAST_TIMES:
            self.next = step.id.step + 1
            return ()
        changed = {**batch, **{name: _with_another_half(batch[name]) for name in rows}}
        trained = [p for p in step.view.root.parameters() if p.requires_grad]
        if not _cancels(step, batch, changed):
            return ()
        with moved(trained):  # of a loss at its least gradients cancel, too
            lasts = _cancels(step, batch, changed)
        width = len(batch[rows[0]]) // 2
        row = ObjectiveRow(op="", module="", given="own_copy", width=width, made_at=rows)
        return (row,) if lasts else ()


def _twice(batch: Batch) -> tuple[str, ...]:
    """Return the names of the tensors of which one half is a copy of the other, () where that does
    not hold for all that have rows of values.
    """
    rows = {n: v for n, v in batch.items() if isinstance(v, Tensor) and v.dim() > 1}
    sizes = {len(value) for value in rows.values()}
    if len(sizes) != 1 or min(sizes) < 2 or min(sizes) % 2:
        return ()
    alike = all(torch.equal(*value.chunk(2)) for value in rows.values())
    return tuple(n for n, v in rows.items() if v.dtype != torch.bool) if alike else ()


def _with_another_half(values: Tensor) -> Tensor:
    first, second = values.chunk(2)
    return torch.cat([first, second.roll(1, -1)])


def _cancels(step: Step, batch: Batch, changed: Batch) -> bool:
    other = _size(step, changed)
    return other > 0.0 and _size(step, batch) <= NOTHING * other


def _size(step: Step, batch: Any) -> float:
    with step.isolated(), torch.enable_grad():
        step.run(0, batch)
        gradients = gradients_of(step.view.root).values()
        parts = [part for gradient in gradients for part in floats(gradient)]
        return sum(float(part.float().square().sum()) for part in parts) ** 0.5
