"""How seldom a run is held up for those who follow it."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean, median

SHARE = 0.0005
"""Half of the thousandth that telling may take: what it costs is known after the first lines."""
LEAST_SECONDS = 1.0
MOST_SECONDS = 4.0
"""By the clock, that a thread which waits, for a device or for data, is not looked at."""


class Pace:
    """Whether something is due that is no part of the training: once in a second at most, and never
    so often that it takes more than ``SHARE`` of the run, by the clock and of the processor's time.

    On a busy machine a run has a part of the processor, while the clock goes on: by the clock alone
    a line a second would be much of what is left of it. ``clock``, and ``processor``, that of the
    thread that trains, in seconds. ``rest``: of its processor time that are left to the run at
    least.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
        rest: float = 0.0,
    ) -> None:
        self._clock, self._processor, self._rest = clock, processor, rest
        self._due = self._rested = -math.inf
        """By the clock and the processor: not before."""
        self._late = -math.inf
        """By the clock: whatever the processor's time."""
        self._began = (0.0, 0.0)
        self._costs: deque[tuple[float, float]] = deque(maxlen=9)

    def is_due(self) -> bool:
        """Return whether it is due now, and note that it begins."""
        now = self._clock()
        if now < self._due:
            return False
        self._began = now, self._processor()
        return self._began[1] >= self._rested or now >= self._late

    def done(self, *, counts: bool = True, least: float = 0.0) -> None:
        """Note that it is over. Not ``counts``: it will not take as long again. ``least``: seconds
        by the clock until it is due again.
        """
        now, used = self._clock(), self._processor()
        if counts:
            self._costs.append((now - self._began[0], used - self._began[1]))
        waited, spent = zip(*self._costs, strict=True) if self._costs else ((0.0,), (0.0,))
        # A pause that a busy machine makes is no cost of ours: by the clock the median.
        self._due = now + max(LEAST_SECONDS, least, median(waited) / SHARE)
        self._late = now + MOST_SECONDS
        self._rested = used + max(self._rest, fmean(spent) / SHARE)

    def hurry(self) -> None:
        """Have it due at once."""
        self._due = self._rested = -math.inf

    def stop(self) -> None:
        """Have it due no more."""
        self._due = math.inf
