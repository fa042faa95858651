"""What trainings of this process have left behind: weights that a later one must not take for badly loaded ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from nanstop.records import TensorStats


class LeftWeights:
    """Weights that were not finite, or far too large, when a training ended that had not begun with them.

    They are known again by what they hold, whatever has become of the tensor: the same model may be trained again, be
    copied, or be saved and loaded.
    """

    def __init__(self) -> None:
        self._known: set[TensorStats] = set()

    def note(self, odd: Iterable[TensorStats], *, loaded: Iterable[TensorStats]) -> None:
        """Note what a training has left; ``loaded`` are weights that were odd before it and are not its doing."""
        names = {stats.name for stats in loaded}
        self._known |= {_content(stats) for stats in odd if stats.name not in names}

    def among(self, odd: Iterable[TensorStats], *, updated: Collection[str] = ()) -> set[str]:
        """Return the names of those that a training has left; ``updated``: that a loop of this process has updated."""
        return {
            stats.name or ""
            for stats in odd
            if stats.name in updated or _content(stats) in self._known
        }


def _content(stats: TensorStats) -> TensorStats:
    return replace(stats, name=None, device="")
