"""What a sweep in a script's process has measured."""

from __future__ import annotations

from nanstop.records.record import record


@record
class Sweep:
    """``losses``: that of each optimizer step, before its update, the one after the last rate
    included.

    ``problem``: why this training cannot be swept.
    ``ended``: the exception that it ended by too soon. Both may be empty.
    """

    losses: tuple[float, ...] = ()
    problem: str = ""
    ended: str = ""
