"""What trainings of this process have left behind.

Weights that a later one must not take for badly loaded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanstop.numerics.trained import held_by

if TYPE_CHECKING:
    from nanstop.records import TensorStats


class LeftWeights:
    """Weights that were not finite, or far too large, when a training ended that had not begun with
    them.

    They are known again by what they hold, whatever has become of the tensor: the same model may be
    trained again, be copied, or be saved and loaded.
    """

    def __init__(self) -> None:
        self._known: set[TensorStats] = set()
        self.optimizers_at_work: Callable[[], Iterable[Any]] = tuple
        """Asked for the optimizers of loops that have made an update.
        Whoever watches loops sets it.
        """

    def note(self, odd: Iterable[TensorStats], *, loaded: Iterable[TensorStats]) -> None:
        """Note what a training has left.

        ``loaded`` are weights that were odd before it and are not its doing.
        """
        names = {stats.name for stats in loaded}
        self._known |= {_content(stats) for stats in odd if stats.name not in names}

    def here(
        self, odd: Iterable[TensorStats], named: Iterable[tuple[str, Any]]
    ) -> tuple[TensorStats, ...]:
        """Return those of ``odd`` that an earlier training of this process has left.

        ``named``: all parameters.
        """
        odd = tuple(odd)
        moved = {id(p) for one in self.optimizers_at_work() for p in held_by(one)} if odd else set()
        names = self.among(odd, updated={name for name, p in named if id(p) in moved})
        return tuple(stats for stats in odd if stats.name in names)

    def among(self, odd: Iterable[TensorStats], *, updated: Collection[str] = ()) -> set[str]:
        """Return the names of those that a training has left.

        ``updated``: that a loop of this process has updated.
        """
        return {
            stats.name or ""
            for stats in odd
            if stats.name in updated or _content(stats) in self._known
        }


LEFT = LeftWeights()
"""Of this process: a later training may be another trainer's, or another loop's."""


def _content(stats: TensorStats) -> TensorStats:
    return replace(stats, name=None, device="")
