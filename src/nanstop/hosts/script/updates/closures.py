"""Updates that an optimizer makes with a closure: judged at their end, put back as a whole.

LBFGS walks along a line and evaluates its closure at each place, SAM evaluates it beside the
weights. One evaluation that is not finite need not be a failure, for a line search comes back from
it; and gradients that are taken away then would leave the weights where the search stood.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.frozen import frozen
from nanstop.hosts.loop.held_update import HeldUpdate
from nanstop.hosts.script.updates.awaited import Awaited
from nanstop.hosts.script.window import ScriptWindow
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.numerics import host_memory
from nanstop.numerics.tensors import nonfinite
from nanstop.numerics.trained import held_by
from nanstop.replay.copies.snapshot import Snapshot, Trainable
from nanstop.replay.untouched import Versions, address, holds

MEMORY_SHARE = 0.25
"""Of the memory that is free, what a copy may take."""
_log = logging.getLogger("nanstop")


@frozen
class FailedEvaluation:
    """An evaluation whose loss or gradients are not finite. ``there``: the weights and the state
    that it was made with; ``versions``: those of the weights then.
    """

    window: ScriptWindow
    norm: Tensor | None
    there: Snapshot
    versions: Versions

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Be at those weights inside, as the evaluation has read them, and back after it."""
        with self.there.loaded():
            self.versions.put_back()
            yield


class OpenUpdate:
    """A call of ``optimizer.step`` that has begun.

    ``held``: what it is not to see, or to do. ``num_evaluations``: how often it has evaluated its
    closure. ``num_inside``: how many steps of classes that its own inherits from it makes now.
    ``evaluates``: it evaluates now. ``moved``: weights were moved before an evaluation.
    ``is_known``: so far its optimizer has evaluated once an update, and moved nothing before.
    ``awaited``: it was launched before its window was read.
    ``waits``: what fails is judged when the update is over; ``failed``: the first that did.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.held = HeldUpdate(optimizer)
        self.awaited: Awaited | None = None
        self.num_evaluations = 0
        self.num_inside = 0
        self.evaluates = False
        self.moved = False
        self.is_known = False
        self.waits = False
        self.failed: FailedEvaluation | None = None
        self.copies: list[Snapshot] = []
        self.places: list[tuple[Tensor, Tensor]] = []
        """Weights and the memory that they are in: SAM gives them other memory."""

    @property
    def is_only(self) -> bool:
        """Whether what was evaluated last is all that the update will be made of."""
        return self.is_known and self.num_evaluations == 1

    def note_failure(self, window: ScriptWindow, norm: Tensor | None) -> None:
        """Remember an evaluation that has failed, with a copy of what it was made with."""
        if self.failed is None:
            there = Snapshot(_trainable(self.optimizer), device=None)
            versions = Versions(there.trainable.parameters.values())
            self.failed = FailedEvaluation(window, norm, there, versions)

    def has_recovered(self) -> bool:
        """Return whether weights and state are finite now, whatever an evaluation was.
        Synchronises the device.
        """
        now = _trainable(self.optimizer)
        return not nonfinite(now.parameters) and not nonfinite(now.state_tensors())

    def put_back(self) -> None:
        """Have weights and state as they were when the call began, as far as there are copies."""
        if not all(copy.is_whole() for copy in self.copies):
            _log.warning("nanstop: tensors in lists of the optimizer's state could not be put back")
        for tensor, place in self.places:
            if address(tensor) != address(place):
                tensor.data = place
        for copy in self.copies:
            copy.restore()


class Returned:
    """What a closure hands on: ``result``, of the last micro-batch of a window."""

    def __init__(self, window: ScriptWindow, result: Any) -> None:
        last = window.micros[-1] if window.micros else None
        self._micro = last if isinstance(last, TapedMicro) and last.returns(result) else None
        self._result = result

    @property
    def can_be_made(self) -> bool:
        """Whether it could be made again with the window."""
        return self._micro is not None or self._result is None

    def anew(self) -> Any:
        """Return it as the window has it that was made anew."""
        return self._result if self._micro is None else self._micro.made_again(self._result)


class Closures:
    """Keeps copies of what updates with a closure change, where an optimizer needs them.

    One that evaluates its closure once and moves nothing before (SGD, Adam) needs none: only the
    first of its updates is copied, to see that. Of any other each update is, for the time that it
    takes. Such an optimizer computes the gradients twice an update at least, beside which a copy of
    weights and state is little: 1 ns an element on one core.
    """

    def __init__(self) -> None:
        self._moves: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()

    def begin(self, update: OpenUpdate, *, may_leave_out: bool) -> None:
        """Copy what an update will change, where that is needed. No synchronisation."""
        update.is_known = not self._moves.get(update.optimizer, True)
        if not update.is_known:
            if may_leave_out:
                _copy(update, _trainable(update.optimizer))
                update.places = [(p, p.data) for p in held_by(update.optimizer)]
            update.waits = bool(update.copies) or not may_leave_out

    def begin_inside(self, update: OpenUpdate, inner: Optimizer) -> None:
        """Copy what another optimizer is about to change inside an update that is copied."""
        if not update.copies or any(c.trainable.optimizer is inner for c in update.copies):
            return
        _copy(update, _trainable(inner, but=held_by(update.optimizer)))

    def evaluating(self, update: OpenUpdate) -> None:
        """Note an evaluation of the closure. Synchronises in the first update of an optimizer."""
        update.num_evaluations += 1
        if update.num_evaluations > 1:
            update.moved = True
        elif update.copies and update.optimizer not in self._moves:
            weights = update.copies[0].parameters.values()
            update.moved = any(not holds(kept.tensor, kept.copy) for kept in weights)

    def end(self, update: OpenUpdate) -> None:
        """Note what an update has needed."""
        if update.num_evaluations:
            self._moves[update.optimizer] = update.moved or self._moves.get(update.optimizer, False)
        update.copies.clear()
        update.places.clear()
        update.failed = None


def _trainable(optimizer: Optimizer, *, but: Sequence[Tensor] = ()) -> Trainable:
    left = {id(p) for p in but}
    weights = (p for p in held_by(optimizer) if id(p) not in left)
    return Trainable({str(place): p for place, p in enumerate(weights)}, optimizer)


def _copy(update: OpenUpdate, trainable: Trainable) -> None:
    """Add a copy where there is room for it, beside what it is of or in host memory."""
    try:
        needed = trainable.num_bytes()
        devices = {p.device for p in trainable.parameters.values()}
        if all(needed <= MEMORY_SHARE * _free_bytes(device) for device in devices):
            update.copies.append(Snapshot(trainable, device=None))
        elif needed <= MEMORY_SHARE * host_memory.free_bytes():
            update.copies.append(Snapshot(trainable))
    except Exception as error:  # nanstop is never the reason a run dies
        _log.warning("nanstop: an update cannot be undone (%s: %s)", type(error).__name__, error)


def _free_bytes(device: torch.device) -> int:
    """Return the memory that is free on a device, 0 where it does not say."""
    if device.type == "cpu":
        return host_memory.free_bytes()
    tells = getattr(torch.get_device_module(device), "mem_get_info", None)
    return tells(device)[0] if tells is not None else 0
