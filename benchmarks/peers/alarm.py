"""What a peer says: where it saw the first bad value, in its own words brought to one form."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from peers.clock import Clock


@dataclass(frozen=True)
class Alarm:
    """The first thing that a peer reported. None or empty: the peer does not say.

    ``ops``: the operators of ATen that what it names may stand for, in favour of the peer.
    ``modules``: likewise.
    """

    step: int | None
    micro: int | None
    phase: str | None = None
    ops: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    said: str = ""


class PeerFailedError(Exception):
    """The peer cannot run this script; the message says why."""


Raise = Callable[[Alarm], None]
Peer = Callable[[Clock, Raise], AbstractContextManager[None]]
