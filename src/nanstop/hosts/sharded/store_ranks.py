"""Ranks that agree through the key-value store in which they have met.

No collective takes part: a rank that does not come makes the others wait, never hang, and a run
without a failure says nothing at all.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from typing import Any

from torch import distributed

from nanstop.errors import NanstopError
from nanstop.hosts.sharded.board import Board, bounded
from nanstop.ranks import patience_seconds

_LONGEST_NAP = 0.1
"""Seconds between two looks at the store, once a rank has waited for a while."""
_PATIENT_FACTOR = 4
_BROKEN = "broken"
_log = logging.getLogger("nanstop")
_GO = "go"


class StoreRanks:
    """See ``decide.agreement.Ranks``. ``store``: shared by all ranks, with nothing else in it.

    ``seconds``: how long one rank waits for another.
    """

    def __init__(self, store: Any, rank: int, size: int, *, seconds: float) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._seconds = seconds
        self._num_asked = 0
        self._broken = ""

    def board(self, name: str) -> Board | None:
        """Return a board of this ``name``, None where the ranks have no store."""
        if self._store is None:
            return None
        library: Any = distributed
        return Board(library.PrefixStore(name, self._store))

    def gather(self, question: str, answer: str, *, patient: bool = False) -> tuple[str, ...]:
        if self._broken:
            raise NanstopError(self._broken)
        number, self._num_asked = self._num_asked, self._num_asked + 1
        seconds = self._seconds * (_PATIENT_FACTOR if patient else 1)
        try:
            said = bounded(lambda: self._met(number, (question, answer), seconds), seconds)
        except NanstopError as error:
            self.leave(error.message)
            raise
        except Exception as error:  # the store is gone with the process that held it
            self.leave(f"the ranks cannot reach each other ({type(error).__name__})")
            raise NanstopError(self._broken) from error
        if len({what for what, _ in said}) > 1:
            places = (f"rank {at} is at `{what}`" for at, (what, _) in enumerate(said))
            self.leave(f"the ranks are not at the same place: {', '.join(places)}")
            raise NanstopError(self._broken)
        return tuple(answer for _, answer in said)

    def _met(self, number: int, mine: tuple[str, str], seconds: float) -> list[tuple[str, str]]:
        """Return the question and the answer of each rank."""
        self._store.set(f"{number}/{self.rank}", json.dumps(mine))
        problem = self._wait(number, seconds)
        # Whether all have come is settled once, by whoever says so first.
        verdict = self._store.compare_set(f"{number}/verdict", "", problem or _GO).decode()
        if verdict != _GO:
            raise NanstopError(verdict)
        said = [json.loads(self._store.get(f"{number}/{one}")) for one in range(self.size)]
        with suppress(Exception):  # all have read what this rank said long ago
            self._store.delete_key(f"{number - 2}/{self.rank}")
        return said

    def leave(self, reason: str) -> None:
        if self._broken:
            return
        self._broken = reason or "a rank has left"
        _log.warning("nanstop: from here on failures are observed only: %s", self._broken)
        with suppress(Exception):
            bounded(lambda: self._store.compare_set(_BROKEN, "", self._broken), 0.0)

    def _wait(self, number: int, seconds: float) -> str:
        """Return why not every rank has come, or "" once all have."""
        until, nap = time.monotonic() + seconds, 0.001
        missing = [one for one in range(self.size) if one != self.rank]
        while missing:
            if self._store.check([f"{number}/{missing[0]}"]):
                missing.pop(0)
            elif self._store.check([_BROKEN]):
                return self._store.get(_BROKEN).decode()
            elif time.monotonic() > until:
                return f"rank {missing[0]} did not answer within {seconds:g} s"
            else:
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
        return ""


def _own_connection(library: Any, store: Any) -> Any:
    """Return the same store on a connection that nobody else waits at. Raises what torch raises
    where there can be none.
    """
    if hasattr(store, "clone"):
        return store.clone()
    if isinstance(store, library.PrefixStore):  # before torch 2.8 none could be cloned
        return _own_connection(library, store.underlying_store)
    if isinstance(store, library.FileStore):
        return library.FileStore(store.path, distributed.get_world_size())
    return library.TCPStore(store.host, store.port, is_master=False, wait_for_workers=False)


def ranks_of_run(host: str) -> StoreRanks:
    """Return the ranks of the default process group; they have left where there is no store.

    ``host``: what asks; each asks for itself, in the same order on every rank.
    """
    rank, size = distributed.get_rank(), distributed.get_world_size()
    try:
        library: Any = distributed  # whose stubs know neither of the three
        store = _own_connection(library, library.distributed_c10d._get_default_store())
        number = store.add(f"nanstop/{host}/{rank}", 1)
        own = library.PrefixStore(f"nanstop/{host}/{number}", store)
    except Exception:  # a store of somebody's own
        own = None
    ranks = StoreRanks(own, rank, size, seconds=patience_seconds())
    if own is None:
        ranks.leave("the ranks have no store in which they could agree")
    return ranks
