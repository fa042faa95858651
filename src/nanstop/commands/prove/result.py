"""What ``nanstop prove`` returns."""

from __future__ import annotations

from typing import Literal

from nanstop.commands.replay.result import Replayed
from nanstop.records import SCHEMA, Atom
from nanstop.records.record import record

ProveVerdict = Literal["gone", "not comparable", "still there", "another failure"]


@record
class Proved:
    """``cure``: what was in force beside the script as it is. ``healthy``: how many updates from
    the incident's on were healthy.
    """

    schema: int = SCHEMA
    verdict: ProveVerdict
    healthy: int
    cure: tuple[Atom, ...] = ()
    replayed: Replayed
