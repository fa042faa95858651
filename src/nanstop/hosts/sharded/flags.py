"""One byte that all ranks of a sharded model have alike: whether any of them has seen a failure.

Each rank has a part of each gradient, and what is not finite may lie in another's.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import distributed

from nanstop.decide.agreement import Ranks
from nanstop.errors import NanstopError

_MARGIN_SECONDS = 2.0
_Answer = bool | Exception


class FailureFlags:
    """Of ``size`` ranks, which all make one at the same time and ask ``any`` equally often.

    They have connections of their own: a rank that is at another place of its script is missed, and
    disturbs no exchange of the script's. Collectives are begun by a thread of nanstop's, on which
    there is no mode of anybody: a connection's thread that lets go of a mode waits for Python,
    which may be waiting for that thread. Errors: ``NanstopError`` where a rank does not come
    within ``seconds``.
    """

    def __init__(self, store: Any, rank: int, size: int, *, seconds: float) -> None:
        self._seconds = seconds
        self._asked: SimpleQueue[bool | None] = SimpleQueue()
        self._answered: SimpleQueue[_Answer] = SimpleQueue()
        self._problem = ""

        def connect() -> Any:
            library: Any = distributed
            return library.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))

        Thread(target=self._work, args=(connect,), name="nanstop-flags", daemon=True).start()
        self._answer()

    def any(self, *, mine: bool) -> bool:
        """Return whether any rank says so. Waits for the slowest. One byte is sent."""
        if self._problem:
            raise NanstopError(self._problem)
        self._asked.put(mine)
        return self._answer()

    def close(self) -> None:
        """Take no part any more, of which the others learn at once."""
        self._problem = "this rank has left"
        self._asked.put(None)

    def _answer(self) -> bool:
        try:
            found = self._answered.get(timeout=self._seconds + _MARGIN_SECONDS)
        except Empty:
            found = NanstopError(f"not all ranks came to an update within {self._seconds:g} s")
        if isinstance(found, Exception):
            self._problem = f"the ranks did not learn of each other's failures ({found})"
            raise NanstopError(self._problem) from found
        return found

    def _work(self, connect: Any) -> None:
        flag = torch.zeros(1, dtype=torch.uint8, device="cpu")
        try:
            group = connect()
            self._answered.put(False)
            options: Any = distributed.AllreduceOptions()
            options.reduceOp = distributed.ReduceOp.MAX
            options.timeout = timedelta(seconds=self._seconds)
            for mine in iter(self._asked.get, None):
                flag.fill_(int(mine))
                group.allreduce([flag], options).wait()
                self._answered.put(bool(flag))
        except Exception as error:
            self._answered.put(error)


class ByFlags:
    """The part of ``Replicas`` by which ranks learn of each other's failures: ``flags``, until one
    of them is missed.
    """

    def __init__(self, ranks: Ranks, flags: FailureFlags | None) -> None:
        self.ranks: Ranks = ranks
        self._flags = flags

    def failed(self, *, mine: bool) -> bool:
        return self.anywhere(mine=mine)

    def exchange_or_leave(self, exchange: Callable[[], object]) -> None:
        """Have gradients exchanged by all ranks. Errors: ``NanstopError`` where that does not come
        to an end; this rank has left the others then.
        """
        try:
            exchange()
        except RuntimeError as error:
            reason = f"the ranks did not exchange their gradients ({error})"
            self.ranks.leave(reason)
            raise NanstopError(reason) from error

    def anywhere(self, *, mine: bool) -> bool:
        if self._flags is None:
            return False
        try:
            return self._flags.any(mine=mine)
        except NanstopError as error:
            self._flags = None
            self.ranks.leave(error.message)
            return False
