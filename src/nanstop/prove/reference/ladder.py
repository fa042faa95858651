"""Which exact run of a failing step there is room for: the ladder that a nearly full machine is
gone down.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from enum import IntEnum
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from nanstop.errors import ShortOfMemoryError
from nanstop.numerics import host_memory, room
from nanstop.numerics.modules import repeated_blocks
from nanstop.numerics.tensors import HALF
from nanstop.prove.failing_step import FailingStep
from nanstop.remedies.streamed import parts

_EXACT_BYTES = 4
_WIDEST_BYTES, _WIDEST_FACTOR = 4 * 8, 4
"""Of a float64 run of what is stored in half precision: bytes an element, with a gradient and two
moments; how much more than the run itself its forward keeps.
"""
_AMPLE = 2**26
"""Bytes that records, reports and kernels may want beside that."""


class Rung(IntEnum):
    """What is held in float32 at a time: the whole model, a part of it while the whole of it is
    run, one part that is run by itself, or the operands of one operation.
    """

    WHOLE = 0
    PARTS = 1
    REGION = 2
    OPERATION = 3


class Ladder:
    """The rung of one failing step; it only goes down. ``place``: the module of the operation that
    fails, "" where it is in none.
    """

    def __init__(self, failing: FailingStep, place: str) -> None:
        self._view, self._takes = failing.step.view, failing.takes
        self._makes_updates = failing.makes_updates
        view = self._view
        self.region = region_of(view.root, place)
        self.rung = next(
            (rung for rung in Rung if self._exists(rung) and self._has_room(rung)), Rung.OPERATION
        )

    def step_down(self) -> None:
        """Go to the next rung that there is room for, if there is one below."""
        below = (rung for rung in Rung if rung > self.rung and self._exists(rung))
        self.rung = next((rung for rung in below if self._has_room(rung)), Rung.OPERATION)

    def _exists(self, rung: Rung) -> bool:
        if rung is Rung.PARTS:
            return len(parts(self._view.root)) > 1 and not self._makes_updates
        return rung is not Rung.REGION or self.region != ""

    def _has_room(self, rung: Rung) -> bool:
        """Return whether a run that holds so much is likely to go through. No synchronisation."""
        left = room.left_on(self._view.device_type)
        if left is None or rung is Rung.OPERATION:
            return True
        root = self._view.root
        # What a run of the step took beyond what is held now: gradients, and what it kept for them.
        gradients = sum(p.nbytes for p in root.parameters() if p.requires_grad)
        takes = self._takes or room.most_beyond_now(self._view.device_type)
        beyond = max(0, takes - gradients)
        if rung is Rung.WHOLE:
            copies = _copies((root, *self._view.beside))
            return left > copies + 2 * beyond
        if rung is Rung.PARTS:
            every = (part for one in (root, *self._view.beside) for part in parts(one).values())
            return left > max((_copies((part,)) for part in every), default=0) + beyond
        return left > _copies((root.get_submodule(self.region),)) + beyond


def bounded(failing: FailingStep, takes: int) -> FailingStep:
    """Return the failing step with what a run of it takes, where what is left may be too little for
    one of the runs of a proof: the widest has weights, gradients and moments in float64. ``takes``:
    what is known of a run where there is little room for a single one, else 0.

    On a CPU it is seen in one run, undone; on a device, a run that lacks memory is an error like
    any other.
    """
    view = failing.step.view
    left = room.left_on(view.device_type)
    if not takes and (view.device_type != "cpu" or left is None):
        return failing
    copies = _WIDEST_BYTES * sum(p.numel() for p in view.root.parameters())
    beyond = _WIDEST_FACTOR * room.most_beyond_now(view.device_type)
    if not takes and left is not None and left > copies + beyond + _AMPLE:
        return failing
    return replace(failing, takes=taken_by(failing) or takes)


def taken_by(failing: FailingStep) -> int:
    """Return what a run of a failing micro-batch takes beyond what is held before it: what its
    forward keeps, and the gradients. 0 where that is not seen: on a device, its allocator knows.
    """
    view, seen = failing.step.view, 0
    before = host_memory.held_bytes()[0]
    if view.device_type != "cpu" or not before:
        return 0

    def sample(*_: Any) -> None:
        nonlocal seen
        seen = max(seen, host_memory.held_bytes()[0] - before)

    handle = register_module_forward_hook(sample)
    try:
        failing.attempt(without_update=True, under=nullcontext)
    except ShortOfMemoryError:
        return 0
    finally:
        handle.remove()
    return seen + sum(p.nbytes for p in view.root.parameters() if p.requires_grad)


def region_of(root: nn.Module, place: str) -> str:
    """Return the block of a model that a module is in, or the module itself outside of all; "" for
    the model as a whole, and for what is no module of it.
    """
    names = dict(root.named_modules())
    around = (one for one in repeated_blocks(root) if f"{place}.".startswith(f"{one}."))
    return next(around, place if place in names else "")


def _copies(modules: Iterable[nn.Module]) -> int:
    """Return what modules take in float32: copies of what is narrower, and gradients."""
    held: dict[int, Tensor] = {}
    for module in modules:
        held |= {id(t): t for t in (*module.parameters(), *module.buffers())}
    narrow = sum(t.numel() for t in held.values() if t.dtype in HALF)
    trained = sum(t.numel() for t in held.values() if t.requires_grad)
    return _EXACT_BYTES * (narrow + trained)
