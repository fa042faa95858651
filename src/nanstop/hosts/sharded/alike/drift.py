"""Whether the copies of one model that several ranks train are still alike.

A backward that exchanges gradients ends on no rank before all have come to it, so its number is the
same on all of them, and what they wrote down before it is there to be read: nobody waits for
anyone. Copies are compared after backwards 0, 1, 2, 4, 8, 64 and every 512th, by one digest of
their weights; only where digests differ do ranks look at gradients and the optimizer's state too,
and tell each other, over the next two backwards, what differs. Where copies are compared twice in
a row, all is looked at both times: the update that parts them lies in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from nanstop.hosts.sharded.alike.comparison import (
    as_text,
    differing,
    parted,
    sample,
    with_difference,
)
from nanstop.hosts.sharded.alike.copies import (
    Copy,
    Told,
    at_update,
    copy_of,
    has_hook,
    parameters_to_compare,
    with_gradients,
)
from nanstop.hosts.sharded.board import Board
from nanstop.numerics.checksums import Checksums
from nanstop.records import ReplicaFacts, SourceLine, codec
from nanstop.replay.conditions import unrecorded

EARLY, EVERY = (0, 1, 2, 4, 8, 64), 512
_log = logging.getLogger("nanstop")
_Stage = Callable[[DistributedDataParallel, int], "ReplicaFacts | None"]


def is_due(number: int) -> bool:
    """Return whether copies are compared after this backward."""
    return number in EARLY or number % EVERY == 0


class Drift:
    """Of one model, on the rank ``rank`` of ``size``: every rank calls ``compare`` after each
    backward that has exchanged its gradients.
    """

    def __init__(self, board: Board | None, rank: int, size: int) -> None:
        self._board: Any = board
        self._rank, self._size = rank, size
        self._number = -1
        self._num_updates = self._num_local = self._num_late = 0
        self._updated: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """After which backward each optimizer has made its last update."""
        self._sums = Checksums()
        """Of the present copy: the numbers of places are let go with it."""
        self._copy: Copy | None = None
        """The last that was written down."""
        self._looks_at = -1
        """The backward whose update is looked at."""
        self._equal: Copy | None = None
        """The last that all ranks have alike."""
        self._next: _Stage | None = None
        self._mine: tuple[Tensor, int] | None = None
        """Values of the weight to be told of, and in which step."""
        self._wiped: Copy | None = None
        """The next to be wiped off the board: every rank has read of it by then."""
        self._is_over = board is None

    def compare(self, model: DistributedDataParallel, step: int) -> ReplicaFacts | None:
        """Return how the copies differ, once, on the first rank; else None.

        Synchronises the device after backwards that are due, and no other.
        """
        self._number += 1
        if self._is_over or (self._next is None and not is_due(self._number)):
            return None
        try:
            with torch.no_grad(), unrecorded():
                found = self._next(model, step) if self._next is not None else None
                if self._next is None and not self._is_over and is_due(self._number):
                    self._write_down(model, step)
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: copies are no longer compared (%s)", error)
            self._end()
            return None
        return found

    def updating(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        written_at: tuple[SourceLine, ...],
        *,
        is_late: bool = False,
    ) -> None:
        """Look at what an update is about to take, if its backward was looked at. Synchronises the
        device then. ``is_late``: see ``Replicas.updating``.
        """
        self._num_updates += 1
        self._num_late += is_late
        self._num_local += self._updated.get(optimizer) == self._number
        self._updated[optimizer] = self._number
        copy = self._copy
        if self._is_over or copy is None or self._looks_at != self._number or copy.consumed:
            return
        try:
            with torch.no_grad(), unrecorded():
                self._copy = at_update(copy, model, optimizer, written_at, self._sums)
            self._sums = Checksums()
        except Exception as error:  # nanstop is never the reason a run dies
            _log.warning("nanstop: copies are no longer compared (%s)", error)
            self._end()

    def _end(self) -> None:
        self._is_over, self._next = True, None
        self._copy = self._equal = self._wiped = self._mine = None

    def _write_down(self, model: DistributedDataParallel, step: int) -> None:
        if has_hook(model):  # copies may differ on purpose, until they are averaged
            return
        if self._rank == 0 and self._wiped is not None:
            self._board.wipe(*(self._at(kind, self._wiped) for kind in ("digest", "equal", "odd")))
        self._wiped = self._equal
        is_followed = is_due(self._number + 1)
        copy = copy_of(model, self._number, step, self._sums)
        copy = replace(
            copy,
            num_updates=self._num_updates,
            num_local=self._num_local,
            num_late=self._num_late,
        )
        self._copy = copy = self._looked_at(copy, model, step) if is_followed else copy
        alike = self._board.agrees(self._at("digest", copy), copy.digest)
        self._board.add(self._at("equal" if alike else "odd", copy))
        self._next = self._read_counts
        if not is_followed:
            self._sums = Checksums()

    def _looked_at(self, copy: Copy, model: DistributedDataParallel, step: int) -> Copy:
        """Return a copy with the gradients of the present backward; its update is looked at too."""
        self._looks_at = self._number
        return with_gradients(copy, model, step, self._sums)

    def _read_counts(self, model: DistributedDataParallel, step: int) -> None:
        copy = self._copy
        assert copy is not None
        equal, odd = self._board.add(self._at("equal", copy), self._at("odd", copy), num=0)
        if equal == self._size:
            self._equal, self._next = copy, None
        elif equal + odd < self._size:  # a rank that is not watched, or not any more
            self._end()
        else:
            self._board.write(self._at(f"weights/{self._rank}", copy), codec.to_json(copy))
            self._copy = copy if copy.arrived else self._looked_at(copy, model, step)
            self._next = self._read_weights

    def _read_weights(self, model: DistributedDataParallel, step: int) -> None:
        """Learn what copies other ranks have: the first those of all, the others that of the first.
        All tell what led there; those who differ from the first, values of the first weight that
        does.
        """
        copy = self._copy
        assert copy is not None
        ranks = range(self._size) if self._rank == 0 else range(1)
        texts = self._board.read([self._at(f"weights/{rank}", copy) for rank in ranks])
        if not texts:
            self._end()
            return
        copies = [codec.from_json(Copy, text) for text in texts]
        names = differing(copies if self._rank == 0 else [*copies, copy])
        weight = parameters_to_compare(model)[names[0]] if names else None
        if self._rank == 0 and weight is not None:
            self._mine, self._next = (sample(weight), step), self._read_told
            return
        told = codec.to_json(Told(copy=copy, before=self._equal))
        self._board.write(self._at(f"told/{self._rank}", copy), told)
        if weight is not None:
            self._board.write(self._at(f"values/{self._rank}", copy), as_text(sample(weight)))
        self._end()

    def _read_told(self, model: DistributedDataParallel, _step: int) -> ReplicaFacts | None:
        copy, mine = self._copy, self._mine
        assert copy is not None
        others = self._board.read([self._at(f"told/{at}", copy) for at in range(1, self._size)])
        mine_told = Told(copy=copy, before=self._equal)
        told = (mine_told, *(codec.from_json(Told, text) for text in others or ()))
        facts = parted(told) if others else None
        if facts is None or mine is None:
            self._end()
            return None
        pairs = [differing([copy, one.copy])[:1] for one in told]
        rank = pairs.index([facts.weight])
        texts = self._board.read([self._at(f"values/{rank}", copy)])
        if texts:
            shape = parameters_to_compare(model)[facts.weight].shape
            facts = with_difference(facts, mine, texts[0], shape)
        self._end()
        return facts

    def _at(self, what: str, copy: Copy) -> str:
        return f"{copy.number}/{what}"
