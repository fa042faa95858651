"""Whether gradients are clipped when there are none to come to the update: ahead of the backward,
where the call returns 0 each time, or after the update, where they are emptied next; or those of no
parameters: a generator that the optimizer has used up. Every update takes what nobody has clipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from nanstop.detect.sentinel import norm_of_gradients
from nanstop.numerics.trained import gradients_held, held_by
from nanstop.records import ClippingFacts
from nanstop.tracing.places import Line, source_line

LEAST, MOST = 4, 256
"""First updates of an optimizer that must all show it, and updates that are looked at at most."""
MOST_CALLS = 64


@dataclass(slots=True)
class _Call:
    """A call since the last update. ``is_empty``: whether there was nothing to clip. ``is_late``:
    no backward has come since that update. ``is_lost``: what it has clipped was emptied.
    """

    parameters: Sequence[Tensor]
    limit: float
    line: Line
    is_empty: bool
    is_late: bool
    is_lost: bool = False


class EmptyClips:
    """Follows the first updates of each optimizer, and what was clipped since the one before."""

    def __init__(self) -> None:
        self._num: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """How many updates each has made so, ``MOST`` where it is not looked at any more."""
        self._shown: WeakKeyDictionary[Optimizer, tuple[float, bool]] = WeakKeyDictionary()
        """The largest norm that an update of it has taken, and whether what was clipped was lost
        once: an update that explodes leaves no gradient to those after it.
        """
        self._calls: list[_Call] = []
        self._is_over = False

    def clipped(
        self,
        parameters: Sequence[Tensor],
        limit: float,
        line: Callable[[], Line],
        *,
        is_late: bool = False,
    ) -> None:
        """Note what is about to be clipped, and the line that clips it; ``is_late``: no backward
        has come since the last update. Reads gradients, which synchronises, in the first updates.
        """
        if self._is_over or len(self._calls) >= MOST_CALLS or not math.isfinite(limit):
            return
        self._calls.append(_Call(parameters, limit, line(), _are_empty(parameters), is_late))

    def emptied(self) -> None:
        """Note that gradients may have been emptied. Reads those that were clipped after an update,
        which synchronises, in the first updates alone.
        """
        for call in self._calls:
            if call.is_late and not call.is_empty:
                call.is_lost = call.is_lost or _are_empty(call.parameters)

    def updating(self, optimizer: Optimizer) -> ClippingFacts | None:
        """Return what an optimizer's first updates have shown, once. Synchronises the device where
        they have.
        """
        if self._is_over:
            return None
        calls, self._calls = self._calls, []
        is_first, number = optimizer not in self._num, self._num.get(optimizer, 0)
        if is_first and not calls:  # it may be clipped for afterwards
            self._num[optimizer] = 0
        elif number < MOST:
            self._num[optimizer] = number = number + 1 if self._is_bare(optimizer, calls) else MOST
        self._is_over = all(num >= MOST for num in self._num.values())
        if not 0 < number < MOST:
            return None
        norm, is_lost = self._shown_by(optimizer, calls)
        limit = min(one.limit for one in calls)
        if number < LEAST or norm <= limit:  # there would have been nothing to clip
            return None
        self._is_over = True
        return ClippingFacts(
            num_updates=number,
            limit=limit,
            norm=norm,
            is_late=is_lost,
            is_of_none=not any(one.parameters for one in calls),
            at=source_line(calls[-1].line),
        )

    def _shown_by(self, optimizer: Optimizer, calls: Sequence[_Call]) -> tuple[float, bool]:
        """Return what updates of an optimizer have shown, see ``_shown``, with the present one."""
        norm = norm_of_gradients(gradients_held(held_by(optimizer)))
        now = float(norm) if norm is not None else 0.0
        largest, is_lost = self._shown.get(optimizer, (0.0, False))
        largest = max(largest, now if math.isfinite(now) else 0.0)
        self._shown[optimizer] = largest, is_lost or any(one.is_lost for one in calls)
        return self._shown[optimizer]

    def _is_bare(self, optimizer: Optimizer, calls: Sequence[_Call]) -> bool:
        """Return whether what this update takes was to be clipped, and each time there was nothing
        yet, or only what the last one had taken.
        """
        taken = {id(p) for p in held_by(optimizer) if p.grad is not None}
        mine = [
            one
            for one in calls
            if not one.parameters or not taken.isdisjoint(map(id, one.parameters))
        ]
        return bool(mine) and all(one.is_empty or one.is_lost for one in mine)


def _are_empty(parameters: Sequence[Tensor]) -> bool:
    present = gradients_held(parameters)
    return not any(one.is_sparse or bool(one.any()) for one in present)
