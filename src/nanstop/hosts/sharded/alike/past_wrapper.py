"""Whether a model that is wrapped is trained without its wrapper: ``model.module(x)`` exchanges no
gradients, and nothing fails.

Ranks that exchange nothing meet nowhere: each writes down its copy after its first update, and the
first rank waits for those of all once, a few updates later.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from nanstop.hosts.sharded.alike.comparison import unexchanged
from nanstop.hosts.sharded.alike.copies import Copy, copy_of, has_hook
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
    """Of one ``model``: every rank calls ``updating`` before each update of gradients that came
    without a wrapper. ``meet``: gives a board that all ranks share, with nothing else on it.
    """

    def __init__(self, model: nn.Module, meet: Callable[[], Board | None]) -> None:
        self._model, self._meet = ref(model), meet
        self._board: Board | None = None
        self._num_updates = 0

    def updating(self, step: int, made_at: tuple[SourceLine, ...]) -> ReplicaFacts | None:
        """Return how the copies differ, once, on the first rank; else None.

        ``made_at``: the line that makes the loss. Looks for a wrapper once, among all objects
        (0.1 s); reads weights once, and synchronises the device, where there is one.
        """
        self._num_updates += 1
        try:
            with torch.no_grad(), unrecorded():
                if self._num_updates == _WRITTEN:
                    self._write_down(step)
                elif self._num_updates == _READ and self._board is not None:
                    return self._read(self._board, step, made_at)
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: copies are not compared (%s)", error)
        return None

    def _write_down(self, step: int) -> None:
        wrapper = _wrapper_of(self._model())
        self._board = board = self._meet() if wrapper is not None else None
        if wrapper is None or board is None:
            return
        copy = copy_of(wrapper, self._num_updates, step, Checksums())
        board.write(f"weights/{distributed.get_rank()}", codec.to_json(copy))

    def _read(
        self, board: Board, step: int, made_at: tuple[SourceLine, ...]
    ) -> ReplicaFacts | None:
        self._board = None
        if distributed.get_rank() != 0:
            return None
        places = [f"weights/{rank}" for rank in range(distributed.get_world_size())]
        end = time.monotonic() + _SECONDS
        while (texts := board.read(places)) is None and time.monotonic() < end:
            time.sleep(_PAUSE)
        copies = [codec.from_json(Copy, text) for text in texts or ()]
        return unexchanged(copies, step, made_at) if copies else None


def _wrapper_of(model: nn.Module | None) -> DistributedDataParallel | None:
    """Return what wraps a model for all processes of the run; nothing called leads there."""
    wrappers = (one for one in gc.get_objects() if type(one) is DistributedDataParallel)
    mine = (one for one in wrappers if any(part is model for part in one.module.modules()))
    return next((one for one in mine if _is_of_all(one) and not has_hook(one)), None)


def _is_of_all(wrapper: DistributedDataParallel) -> bool:
    group: Any = wrapper.process_group
    return group.size() == distributed.get_world_size()
