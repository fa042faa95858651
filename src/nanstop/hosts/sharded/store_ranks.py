"""Ranks that agree through the key-value store in which they have met.

No collective takes part: a rank that does not come makes the others wait, never hang, and a run
without a failure says nothing at all.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from typing import Any

from torch import distributed

from nanstop.errors import NanstopError
from nanstop.hosts.sharded.board import Board, bounded
from nanstop.hosts.sharded.flags import FailureFlags
from nanstop.ranks import patience_seconds

FIRST_SECONDS = 30.0
"""How long ranks are waited for that may not be watched."""
_PATIENT_FACTOR = 4
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
        self._num_asked = self._num_flags = 0
        self._broken = ""

    def board(self, name: str) -> Board | None:
        """Return a board of this ``name``, None where the ranks have no store."""
        if self._store is None:
            return None
        library: Any = distributed
        return Board(library.PrefixStore(name, self._store))

    def flags(self) -> FailureFlags | None:
        """Return flags of these ranks. Every rank asks at the same place of its script; None where
        one does not come, the first time within ``FIRST_SECONDS``: it may not be watched at all.
        """
        library: Any = distributed
        try:
            self.gather("flags", "", seconds=min(FIRST_SECONDS, self._seconds))
            self._num_flags += 1
            store = library.PrefixStore(f"flags/{self._num_flags}", self._store)
            return FailureFlags(store, self.rank, self.size, seconds=self._seconds)
        except NanstopError as error:
            self.leave(error.message)
            return None

    def gather(
        self, question: str, answer: str, *, patient: bool = False, seconds: float | None = None
    ) -> tuple[str, ...]:
        if self._broken:
            raise NanstopError(self._broken)
        number, self._num_asked = self._num_asked, self._num_asked + 1
        seconds = seconds or self._seconds * (_PATIENT_FACTOR if patient else 1)
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
        """Return the question and the answer of each rank, which the first one puts together: the
        store is asked a few times by each of them, not by each for each.
        """
        verdict, whole = f"{number}/verdict", f"{number}/all"
        self._store.set(f"{number}/{self.rank}", json.dumps(mine))
        problem = ""
        try:
            self._store.wait(self._every(number) if self.rank == 0 else [verdict], _time(seconds))
        except RuntimeError:
            missing = (at for at, key in enumerate(self._every(number)) if not self._has(key))
            problem = f"rank {next(missing, 0)} did not answer within {seconds:g} s"
        if self.rank == 0 and not problem:
            self._store.set(whole, _put_together(map(self._store.get, self._every(number))))
        # Whether all have come is settled once, by whoever says so first.
        settled = self._store.compare_set(verdict, "", problem or _GO).decode()
        if settled != _GO:
            raise NanstopError(settled)
        said = _taken_apart(self._store.get(whole))
        with suppress(Exception):  # all have read what was said long ago
            self._store.delete_key(f"{number - 2}/{self.rank}")
            if self.rank == 0:
                self._store.delete_key(f"{number - 2}/all")
        return said

    def leave(self, reason: str) -> None:
        if self._broken:
            return
        self._broken = reason or "a rank has left"
        _log.warning("nanstop: from here on failures are observed only: %s", self._broken)
        number = self._num_asked  # of the next question, which all others come to and wait at

        def tell() -> None:
            self._store.compare_set(f"{number}/verdict", "", self._broken)
            self._store.set(f"{number}/{self.rank}", "")

        with suppress(Exception):
            bounded(tell, 0.0)

    def _every(self, number: int) -> list[str]:
        return [f"{number}/{rank}" for rank in range(self.size)]

    def _has(self, key: str) -> bool:
        return self._store.check([key])


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=seconds)


def _put_together(said: Iterable[bytes]) -> str:
    """Return what all ranks say, each text once, and how many ranks in a row say it."""
    texts: dict[str, int] = {}
    numbers = [texts.setdefault(one.decode(), len(texts)) for one in said]
    rows = [(number, len(list(same))) for number, same in groupby(numbers)]
    return json.dumps([list(texts), rows])


def _taken_apart(together: bytes) -> list[tuple[str, str]]:
    """Return the question and the answer of each rank, as ``_put_together`` was given them."""
    texts, rows = json.loads(together)
    pairs = [tuple(json.loads(text)) for text in texts]
    return [pairs[number] for number, count in rows for _ in range(count)]


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
