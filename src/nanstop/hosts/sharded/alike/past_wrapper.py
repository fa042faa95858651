"""Whether a model that is wrapped is trained without its wrapper: ``model.module(x)`` exchanges no
gradients, and nothing fails.

Ranks that exchange nothing meet nowhere: each writes down its copy after its first update, and the
first rank waits for those of all once, a few updates later.
"""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nanstop.hosts.sharded.alike.comparison import unexchanged
from nanstop.hosts.sharded.alike.copies import Copy, copy_of
from nanstop.hosts.sharded.board import Board
from nanstop.numerics.checksums import Checksums
from nanstop.records import ReplicaFacts, SourceLine, codec
from nanstop.replay.conditions import unrecorded

_WRITTEN = 2
"""The update before which copies are written down."""
_READ = 4
"""The update before which those of all are read."""
_SECONDS = 10.0
"""How long the first rank waits for another that is not as far: it may have started later."""
_PAUSE = 0.05
_log = logging.getLogger("nanstop")


class PastWrapper:
    """Of one ``model``, on the rank ``rank`` of ``size``: every rank calls ``updating`` before each
    update of gradients that came without a wrapper.
    """

    def __init__(self, model: nn.Module, board: Board | None, rank: int, size: int) -> None:
        self._model, self._rank, self._size = model, rank, size
        self._board: Any = board
        self._num_updates = 0

    def updating(self, step: int, made_at: tuple[SourceLine, ...]) -> ReplicaFacts | None:
        """Return how the copies differ, once, on the first rank; else None.

        ``made_at``: the line that makes the loss. Looks for a wrapper once, among all objects
        (0.1 s); reads weights once, and synchronises the device, where there is one.
        """
        self._num_updates += 1
        if self._board is None or self._num_updates not in (_WRITTEN, _READ):
            return None
        try:
            with torch.no_grad(), unrecorded():
                if self._num_updates == _WRITTEN:
                    self._write_down(step)
                    return None
                return self._read(step, made_at) if self._rank == 0 else None
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: copies are not compared (%s)", error)
            self._board = None
            return None

    def _write_down(self, step: int) -> None:
        wrapper = _wrapper_of(self._model)
        if wrapper is None:
            self._board = None
            return
        copy = copy_of(wrapper, self._num_updates, step, Checksums())
        self._board.write(f"weights/{self._rank}", codec.to_json(copy))

    def _read(self, step: int, made_at: tuple[SourceLine, ...]) -> ReplicaFacts | None:
        board, self._board = self._board, None
        places = [f"weights/{rank}" for rank in range(self._size)]
        end = time.monotonic() + _SECONDS
        while (texts := board.read(places)) is None and time.monotonic() < end:
            time.sleep(_PAUSE)
        copies = [codec.from_json(Copy, text) for text in texts or ()]
        return unexchanged(copies, step, made_at) if copies else None


def _wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """Return what wraps a model: nothing that is called leads there."""
    wrappers = (one for one in gc.get_objects() if type(one) is DistributedDataParallel)
    return next((one for one in wrappers if any(m is model for m in one.module.modules())), None)
