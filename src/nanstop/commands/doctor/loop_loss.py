"""Finds where a raw loop first has its loss as one number, so that a failure can be planted
there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor

from nanstop.commands.doctor.planted import Reads
from nanstop.own_code import is_torchs, lies_in

_UPDATERS = ("torch.optim", "torch.amp.grad_scaler")

CallKey = tuple[str, str, int]
"""A call: function, caller's line, and how often it came before in this micro-batch."""


class LoopMode(Reads):
    """``planted(loss)`` is asked for every loss once its place is known.

    The number from which only numbers follow.

    The place is found by following the loss of a healthy ``backward`` back through scalars.
    ``between``: called once, when an update is over and nothing of the next window has begun.
    """

    def __init__(self, planted: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.on = False
        self._planted = planted
        self._place: CallKey | None = None
        self._scalars: dict[int, tuple[Tensor, CallKey, tuple[int, ...]]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._entered = False
        self.between: Callable[[], None] | None = None
        self._process = os.getpid()

    @property
    def placed(self) -> bool:
        """Whether it is known where the loss is made."""
        return self._place is not None

    def enter(self) -> None:
        """Look at every call of torch from here on; entered once and never left."""
        if not self._entered:
            self._entered = True
            self.__enter__()

    def begin(self, muted: Iterable[str]) -> None:
        """Note from here on which lines read a value that was made bad."""
        self.muted, self.lines, self.on, self.blind = frozenset(muted), {}, True, False

    def locate(self, loss: Tensor) -> None:
        """Take the loss of a backward: a micro-batch is over."""
        if self._place is None:
            entry, place = self._scalars.get(id(loss)), None
            while entry is not None:
                place, parents = entry[1], entry[2]
                entry = self._scalars.get(parents[0]) if len(parents) == 1 else None
            self._place = place
        self._scalars.clear()
        self._counts.clear()

    def call(self, func: Any, args: Any, kwargs: Any, caller: FrameType) -> Any:
        """Return the result of a call, or the planted loss in its place."""
        if self.between is not None and not _is_updating(caller):
            between, self.between = self.between, None
            between()
        result = super().call(func, args, kwargs, caller)
        if not _is_loss(result) or os.getpid() != self._process:
            return result
        call = getattr(func, "__name__", ""), _caller(caller)
        key: CallKey = (*call, self._counts[call])
        self._counts[call] += 1
        if key == self._place:
            self._counts.clear()
            return self._planted(result)
        if self._place is None:
            parents = tuple(id(each) for each in args if id(each) in self._scalars)
            self._scalars[id(result)] = result, key, parents
        return result


def _is_loss(result: Any) -> bool:
    return (
        isinstance(result, Tensor)
        and result.dim() == 0
        and result.requires_grad
        and result.grad_fn is not None
    )


def _is_updating(frame: FrameType | None) -> bool:
    """Return whether an optimizer or a loss scaler is at work."""
    while frame is not None:
        if lies_in(frame.f_code.co_filename, *_UPDATERS):
            return True
        frame = frame.f_back
    return False


def _caller(frame: FrameType | None) -> str:
    while frame is not None and is_torchs(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
