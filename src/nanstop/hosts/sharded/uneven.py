"""Ranks with fewer batches than others, under torch's ``Join``: they wait inside of it, and come to
no question of nanstop's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nanstop.errors import NanstopError
from nanstop.hosts.sharded.board import Board

_AWAY = "away"


class Uneven:
    """``board``: that all ranks share, with nothing else on it."""

    def __init__(self, board: Board | None) -> None:
        self._board = board

    @contextmanager
    def away(self) -> Iterator[None]:
        """Have others know inside that this rank does not come. What it takes part in inside, they
        come to after it was written down.
        """
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def any_away(self) -> bool:
        """Return whether a rank is away, or it is not known: the same on all that are not, after a
        backward that has exchanged gradients. A rank that made that one is there until the next.
        """
        try:
            return self._board is None or self._board.add(_AWAY, num=0) != (0,)
        except NanstopError:
            return True

    def _count(self, num: int) -> None:
        with suppress(NanstopError):  # where the ranks cannot reach each other nobody is asked
            if self._board is not None:
                self._board.add(_AWAY, num=num)


@dataclass(frozen=True)
class Incomplete:
    """See ``decide.agreement.Ranks``. Some are away, and the others do not wait for them."""

    rank: int
    size: int

    def gather(self, question: str, answer: str, *, patient: bool = False) -> tuple[str, ...]:  # noqa: ARG002
        raise NanstopError("a rank has no batches left")

    def leave(self, reason: str) -> None:
        pass
