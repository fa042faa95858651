"""What every sweep of a script's training keeps: the rate of each step, and its loss."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from nanstop.commands.lr_range.curve import has_diverged, rates
from nanstop.commands.lr_range.result import Sweep
from nanstop.commands.lr_range.sweep import set_rates, shares_of
from nanstop.process.inject.progress import Progress, tell


class LrRecorder:
    """The rate of each optimizer step, and the loss of each.

    One more than rates, that after the last.

    ``problem``: why this training cannot be swept; ``ended``: what it ended by too soon;
    both empty where nothing is wrong.
    """

    def __init__(self, *, low: float, high: float, steps: int) -> None:
        self.rates = rates(low, high, steps)
        self.losses: list[float] = []
        self.problem = self.ended = ""
        self._shares: WeakKeyDictionary[Any, tuple[float, ...]] = WeakKeyDictionary()

    def set_rate(self, optimizer: Any, step: int) -> None:
        """Set the rate of a step, counted from 0; groups keep their shares.

        No synchronisation after the first.
        """
        if optimizer not in self._shares:
            self._shares[optimizer] = shares_of(optimizer)
        # After the last measured loss nothing more may be learnt from an update.
        set_rates(optimizer, self._shares[optimizer], self.rates[min(step, len(self.rates) - 1)])
        tell(Progress(done=step, total=len(self.rates)))

    def is_over(self, *, world_size: int) -> bool:
        """Return whether enough is known.

        Ranks see different losses: together they run to the end.
        """
        first, after = self.losses[:1], self.losses[1:]
        if len(after) >= len(self.rates) or self.problem:
            return True
        return world_size == 1 and bool(first) and has_diverged(first[0], after)

    def measured(self) -> Sweep:
        """Return what was measured so far as a record."""
        return Sweep(losses=tuple(self.losses), problem=self.problem, ended=self.ended)
