"""How much of what a loader does for one batch a tape records."""

from __future__ import annotations

MOST_CALLS = 256
"""Calls of a fetch that are recorded: one that transforms each of its samples makes thousands, at
several times their own cost. A bad row that comes of a later one is made again by its data set.
"""


class Fetch:
    """Is entered while a batch is fetched. ``is_on``: whether one is now."""

    is_on = False
    _num_calls = 0

    def __enter__(self) -> None:
        self.is_on, self._num_calls = True, 0

    def __exit__(self, *_: object) -> None:
        self.is_on = False

    def is_past(self) -> bool:
        """Return whether the call that comes now is one too many for its fetch."""
        self._num_calls += 1
        return self._num_calls > MOST_CALLS
