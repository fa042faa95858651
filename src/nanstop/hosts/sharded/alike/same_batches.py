"""Whether all ranks are given the same batches: together they learn what one of them would alone.

Each writes down a digest of its first batches, after backwards whose gradients were exchanged, and
reads later what the others wrote: see ``terms``.
"""

from __future__ import annotations

import hashlib
import logging

from nanstop.hosts.sharded.board import Board
from nanstop.numerics.checksums import checksums
from nanstop.numerics.tensors import is_plain, tensors
from nanstop.replay.conditions import unrecorded
from nanstop.replay.step import Batch

_COMPARED = 3
"""Batches in a row."""
_AFTER = 2
"""Backwards from the last writing to the reading, as of ``Terms``."""
_log = logging.getLogger("nanstop")


class SameBatches:
    """``board``: that all ``size`` ranks share. Every rank calls ``compare`` after each backward
    that has exchanged gradients, from the same one on. Seven requests a run, whatever its length.
    """

    def __init__(self, board: Board | None, size: int) -> None:
        self._board, self._size = board, size
        self._number = 0
        self._seen: set[str] = set()

    def compare(self, batch: Batch) -> bool:
        """Return whether the first batches were the same on all ranks, and no two of one rank;
        once, after the last of them. Synchronises each device after the first backwards.
        """
        self._number += 1
        if self._board is None:
            return False
        try:
            if self._number <= _COMPARED:
                self._write_down(self._board, batch)
            elif self._number == _COMPARED + _AFTER:
                (same,) = self._board.add("same", num=0)
                self._board = None
                return same == _COMPARED * self._size and len(self._seen) == _COMPARED
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: batches of the ranks are not compared (%s)", error)
            self._board = None
        return False

    def _write_down(self, board: Board, batch: Batch) -> None:
        with unrecorded():
            given = [one for one in tensors(dict(batch)) if is_plain(one) and one.numel()]
            sums = [
                (tuple(one.shape), total)
                for one, total in zip(given, checksums(given), strict=True)
            ]
        if not sums:
            self._board = None
            return
        digest = hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
        self._seen.add(digest)
        board.add("same" if board.agrees(f"{self._number}/digest", digest) else "odd")
