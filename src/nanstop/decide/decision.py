"""What an adapter is asked to do about a failing step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from nanstop.records import Atom

Kind = Literal["proceed", "redo", "skip", "rollback", "stop"]

STOPPED = 3
"""Exit code of a training that was stopped: its incident is unresolved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """``atoms``: remedies by micro-batch of the window that is redone.

    ``adopt``: remedies to switch on for the rest of the run once a rollback has put the snapshot back. ``on_stop``: as
    the policy says it.
    """

    kind: Kind
    atoms: Mapping[int, tuple[Atom, ...]] = field(default_factory=dict)
    adopt: tuple[Atom, ...] = ()
    reason: str = ""
    incident: str = ""
    on_stop: Literal["raise", "end"] = "raise"
