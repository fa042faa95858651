"""What ranks write down for each other in their store, without waiting for anyone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from nanstop.errors import NanstopError

_MARGIN_SECONDS = 2.0
T = TypeVar("T")


class Board:
    """``store``: shared by all ranks, with nothing else in it.

    Whoever reads after a collective that came after the writing finds what was written: each
    method returns once the store has answered. Errors: ``NanstopError`` where it does not, within
    two seconds, or does not exist any more.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def agrees(self, place: str, mine: str) -> bool:
        """Return whether the first rank that came to a place has said the same as this one."""
        return self._asked(lambda: self._store.compare_set(place, "", mine).decode() == mine)

    def add(self, *counters: str, num: int = 1) -> tuple[int, ...]:
        """Return some counters after ``num`` was added to each."""
        return self._asked(lambda: tuple(self._store.add(one, num) for one in counters))

    def write(self, place: str, text: str) -> None:
        """Write a text down."""

        def work() -> None:
            self._store.set(place, text)
            self._store.check([place])  # which is answered once it is there

        self._asked(work)

    def read(self, places: Iterable[str]) -> list[str] | None:
        """Return the texts at some places, None where one is missing."""
        listed = list(places)

        def work() -> list[str] | None:
            if not self._store.check(listed):
                return None
            return [self._store.get(place).decode() for place in listed]

        return self._asked(work)

    def wipe(self, *places: str) -> None:
        """Forget what is written at some places."""

        def work() -> None:
            for place in places:
                with suppress(RuntimeError):  # not every store can
                    self._store.delete_key(place)

        self._asked(work)

    def _asked(self, work: Callable[[], T]) -> T:
        try:
            return bounded(work, 0.0)
        except RuntimeError as error:  # of torch: the process that held the store is gone
            raise NanstopError(f"the ranks cannot reach each other ({error})") from error


def bounded(work: Callable[[], T], seconds: float) -> T:
    """Return what ``work`` does; where the process that holds the store is frozen, it never ends.

    Errors: what it raises; ``NanstopError`` after ``seconds`` and some.
    """
    done: SimpleQueue[tuple[T | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except Exception as error:
            done.put((None, error))

    Thread(target=run, name="nanstop-ranks", daemon=True).start()
    try:
        result, error = done.get(timeout=seconds + _MARGIN_SECONDS)
    except Empty:
        raise NanstopError("the store of the ranks does not answer") from None
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]  (None only with an error)
