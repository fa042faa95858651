"""What a peer says: where it saw the first bad value, in its own words brought to one form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from births import Clock


@dataclass(frozen=True)
class Alarm:
    """The first thing that a peer reported. None: the peer does not say."""

    step: int
    micro: int
    phase: str | None = None
    op: str | None = None
    module: str | None = None
    said: str = ""


Raise = Callable[[Alarm], None]
Peer = Callable[[Clock, Raise], AbstractContextManager[None]]
