"""Whether all ranks are watched under the same policy: then each knows what the others do about
what all of them have alike, if they cannot ask each other any more.
"""

from __future__ import annotations

from nanstop.errors import NanstopError
from nanstop.hosts.sharded.board import Board

_AFTER = 2
"""Backwards from the writing to the reading. The device may lag behind by one: where the next has
been read, every rank has come to the end of the one before.
"""


class Terms:
    """``board``: that all ``size`` ranks share, with nothing else on it. Every rank calls
    ``compare`` after each backward that has exchanged gradients, from the same one on; nobody waits
    for anyone. Three requests a run, whatever its length.
    """

    def __init__(self, board: Board | None, size: int) -> None:
        self.are_alike = False
        self._board, self._size = board, size
        self._number, self._written = 0, -1

    def compare(self, terms: str | None) -> None:
        """Come to an agreement on these ``terms`` if that is due; None: they are not known yet."""
        self._number += 1
        if self._board is None or terms is None:
            return
        try:
            if self._written < 0:
                self._written = self._number
                if self._board.agrees(f"{self._number}/terms", terms):
                    self._board.add(f"{self._number}/same")
            elif self._number - self._written == _AFTER:
                (same,) = self._board.add(f"{self._written}/same", num=0)
                self.are_alike, self._board = same == self._size, None
        except NanstopError:  # the ranks cannot reach each other
            self._board = None
