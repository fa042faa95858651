"""Ranges of every module at a few steps of a run whose numbers are kept, so that two runs can be
told apart by layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanstop.records import Series
from nanstop.session.history import WHOLE, History

if TYPE_CHECKING:
    from nanstop.replay.step import Step

PREFIX = "range"
"""Of a series' name: ``range 0007 model.layers.1.mlp`` is the eighth module to end in the
forward.
"""


class SampledRanges:
    """Takes samples at steps 0, 1, 2, 4, 8, ...:
    the same ones in every run, ever rarer, where they are ``wanted``.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._taken: set[int] = set()
        self._history = History(WHOLE)

    def due(self, step: int) -> bool:
        """Return whether a sample of this step is wanted, and was not taken yet."""
        return self._wanted and step & (step - 1) == 0 and step not in self._taken

    def take(self, step: Step) -> None:
        """Run the first micro-batch of a step once more, undone, and keep the ranges.
        Raises what the step raises.
        """
        from nanstop.tracing.module_ranges import module_ranges

        self._taken.add(step.id.step)
        for place, (name, largest) in enumerate(module_ranges(step).items()):
            self._history.add(f"{PREFIX} {place:04d} {name}", step.id.step, largest)

    def records(self) -> tuple[Series, ...]:
        """Return one series for each module. Synchronises the device."""
        return self._history.records()


def module_of(name: str) -> str | None:
    """Return the module whose ranges a series of this name holds; None for any other series."""
    kind, _, rest = name.partition(" ")
    return rest.partition(" ")[2] if kind == PREFIX else None
