"""What recording the ops outside a model may cost."""

from __future__ import annotations

import time

from nanstop.hosts.tape.tape import Tape

_OP_SECONDS = 20e-6
_PASSED_SECONDS = 1.5e-6
_TIME_SHARE = 0.03
_FREE_SECONDS = 800e-6
"""Recording the ops outside the model costs about 20 us each (16 to 27 seen on one core), passing
on what is asked of a gradient or a shape 1.5 us. It stays on while that is below 3 % or
unnoticeable: 40 ops.
"""
_RUN_SECONDS = 3.0
"""What it may cost in a run whatever its share: small models train for seconds, and their first
failure is to be found where it is.
"""


class TapeBudget:
    """Says of the micro-batches to come, by the last one, whether recording costs little.

    ``outer_is_cheap``: that of ops on tensors which no model has made.
    """

    def __init__(self) -> None:
        self.outer_is_cheap = True
        self._num_ops = 0
        self._spent = 0.0
        self._seconds = 0.0
        self._began = 0.0

    @property
    def is_cheap(self) -> bool:
        return self._fits(self._num_ops * _OP_SECONDS)

    def begun(self) -> None:
        """Note that a micro-batch begins."""
        now = time.perf_counter()
        self._seconds, self._began = now - self._began, now

    def recorded(self, tape: Tape) -> None:
        """Note what a micro-batch had recorded when its backward came."""
        self._num_ops = tape.num_ops
        passed = tape.num_passed * _PASSED_SECONDS
        self._spent += (tape.num_ops + tape.num_outer) * _OP_SECONDS + passed
        self.outer_is_cheap = self._fits(tape.num_outer * _OP_SECONDS + passed)

    def _fits(self, seconds: float) -> bool:
        unnoticed = max(_TIME_SHARE * self._seconds, _FREE_SECONDS)
        return seconds <= unnoticed or self._spent + seconds <= _RUN_SECONDS
