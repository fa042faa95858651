"""What an audit of a stack's own guards saw and concluded."""

from __future__ import annotations

from typing import Literal, get_args

from nanstop.records.record import record
from nanstop.records.vocabulary import SCHEMA

Injected = Literal["nan_loss", "inf_loss", "nan_gradient", "inf_gradient", "norm_overflow"]
"""A failure that is planted in one step:
in its loss, in one gradient, or in the norm of finite gradients.
"""

INJECTED: tuple[Injected, ...] = get_args(Injected)

GuardKind = Literal["log_filter", "scaler", "clip", "callback", "line", "watch", "host"]
"""``line``: a line of the script that reads a bad value;
``host``: what remains when every other guard is away.
"""

Act = Literal[
    "stops the write",
    "stops after the write",
    "only logs",
    "hides",
    "makes it worse",
    "does nothing",
    "not tried",
]


@record
class Guard:
    """Something of the user's stack that may keep a failure from the weights.

    ``name`` is unique in an audit.
    """

    name: str
    kind: GuardKind
    cases: tuple[Injected, ...] = INJECTED
    """The failures that it is tried on:
    a line of a script only on those that it was seen to read.
    """


@record
class GuardTrial:
    """One short training with a failure planted in its second step, and the guards ``removed``
    taken away.

    Counts are of elements. Gradients are those that the optimizer read in the failing step;
    ``growth``: how far the weights went, as a multiple of the same training without a failure.
    """

    injected: Injected
    removed: tuple[str, ...] = ()
    took: bool = True
    """Whether the failure came about: what was to be changed was met."""
    bad_weights: int = 0
    bad_state: int = 0
    growth: float = 1.0
    bad_gradients: int = 0
    zero_gradients: int = 0
    ended: Literal["went on", "stopped", "raised"] = "went on"
    error: str = ""
    bad_logs: tuple[str, ...] = ()
    """Logged numbers that were not finite, as ``STEP:NAME``."""
    said: tuple[str, ...] = ()
    """Lines that were printed or logged, and are not when nothing fails."""
    lines: tuple[str, ...] = ()
    """Lines of the script that read a value that was not finite."""


@record
class GuardRow:
    """What one guard did about each failure, in the order of ``INJECTED``."""

    guard: Guard
    acts: tuple[Act, ...]


@record
class InjectedRow:
    """What became of one failure with every guard in place.

    ``stopped_by``: guards that kept it from the weights.
    """

    injected: Injected
    tried: bool
    reaches_weights: bool
    outcome: str
    stopped_by: tuple[str, ...] = ()


@record
class Doctor:
    """The outcome of ``nanstop doctor``, and every trial that it rests on."""

    schema: int = SCHEMA
    host: str
    failures: tuple[InjectedRow, ...]
    guards: tuple[GuardRow, ...]
    trials: tuple[GuardTrial, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_reaching(self) -> int:
        """How many of the failures reach the weights."""
        return sum(row.reaches_weights for row in self.failures)
