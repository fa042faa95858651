"""What a script's process has seen of its own training, and what that says of an incident."""

from __future__ import annotations

from typing import Literal

from nanstop.records import SCHEMA, Report, Series
from nanstop.records.record import record

Met = Literal["same", "other", "nothing"]
"""The incident's failure, another one, or none."""


@record
class Seen:
    """``updates``: how many updates were made or left out. ``losses``: of each micro-batch.
    ``reports``: what failed. ``ended``: the exception that the training ended by, "" for none.
    """

    updates: int = 0
    losses: Series | None = None
    reports: tuple[Report, ...] = ()
    ended: str = ""


@record
class Difference:
    """The first loss before the incident that is another one now than in the run that failed."""

    step: int
    before: float
    now: float


@record
class Replayed:
    """An incident met again. ``incident``: its folder; ``step``: of its failure, from 0.

    ``updates``: how many were made or left out. ``report``: of the failure that was met, None for
    none. ``differs``: None where the run up to the incident is the one that failed, as far as
    losses tell. ``ended``: the exception that the training ended by, "" for none.
    """

    schema: int = SCHEMA
    incident: str
    step: int
    met: Met
    updates: int
    report: Report | None = None
    differs: Difference | None = None
    ended: str = ""
