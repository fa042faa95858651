"""How a loss answers to other numbers in the place of an operation's: what it takes them for.

A loss that is spelled by hand is no operation of its own. What it is follows from its values: the
micro-batch is run again, undone, with chosen numbers at one place, and the losses are compared with
those that the objective in question would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanstop.tracing.op_patches import SecondRun
from nanstop.tracing.record_step import first_loss

if TYPE_CHECKING:
    from nanstop.replay.step import Step

NEAR, FAR = 1e3, 1e4
"""Numbers that are added to scores."""
LARGE = 8.0
OTHERS = (3.0, -2.0, 1.0)
"""Numbers that are put in the place of scores: ``LARGE``, its opposite and 0 settle what the others
are held against.
"""
SAME = 1e-2
"""Of what the loss changes by."""


def falls_without_end(step: Step, made_at: Collection[int]) -> bool:
    """Return whether the loss of the first micro-batch falls in step with a number that is added to
    all that some ops make, however far.

    Logits may be shifted as one likes, and the distance to a target grows in the end. Undone
    bitwise; runs it three times.
    """
    with suppress(Exception):  # the script's own code may refuse such numbers
        plain = _shifted(step, made_at, 0.0)
        near, far = (plain - _shifted(step, made_at, by) for by in (NEAR, FAR))
        told = near > SAME * max(1.0, abs(plain))
        return told and math.isclose(far / near, FAR / NEAR, rel_tol=SAME)
    return False


def takes_logits_of_labels(step: Step, made_at: int) -> bool:
    """Return whether the loss of the first micro-batch is a binary cross entropy of logits, as a
    function of one number s in all places of what an op makes: a + b (log(1 + exp(s)) - c s), with
    b above 0 and c between 0 and 1. Undone bitwise; runs it six times.
    """
    with suppress(Exception):  # as above
        zero, up, down = (_filled(step, (made_at,), score) for score in (0.0, LARGE, -LARGE))
        # The sum of both ends says nothing of c, their difference nothing of a.
        size = (up + down - 2.0 * zero) / (_risen(LARGE) + _risen(-LARGE))
        if not size > SAME * abs(zero):
            return False
        share = 0.5 - (up - down) / (2.0 * LARGE * size)
        gaps = [
            _filled(step, (made_at,), score) - zero - size * (_risen(score) - share * score)
            for score in OTHERS
        ]
        return -SAME <= share <= 1.0 + SAME and max(map(abs, gaps)) <= SAME * size
    return False


def rises_on_one_side(step: Step, made_at: Collection[int]) -> bool:
    """Return whether the loss of the first micro-batch, as a function of one number in all places
    of what some ops make, only falls, and no further in the end, as that of a margin does: nothing
    asks for a low one. Undone bitwise; runs it nine times.
    """
    with suppress(Exception):  # as above
        scores = (-2.0 * LARGE, -LARGE, *sorted((*OTHERS, 0.0)), LARGE, 2.0 * LARGE)
        losses = [_filled(step, made_at, score) for score in scores]
        size = (losses[0] - losses[1]) / LARGE
        room = SAME * size
        falls = all(later <= earlier + room for earlier, later in pairwise(losses))
        return falls and size > SAME * abs(losses[-1]) and losses[-2] - losses[-1] <= room
    return False


def _risen(score: float) -> float:
    """Return log(1 + exp(score)), less what it is at 0."""
    return math.log1p(math.exp(score)) - math.log(2.0)


def _shifted(step: Step, made_at: Collection[int], by: float) -> float:
    return first_loss(step, _Changed(made_at, lambda made: made.add_(by)))


def _filled(step: Step, made_at: Collection[int], score: float) -> float:
    return first_loss(step, _Changed(made_at, lambda made: made.fill_(score)))


class _Changed(SecondRun):
    """Has what some ops make changed before anybody reads it."""

    def __init__(self, made_at: Collection[int], change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._made_at, self._change = made_at, change

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if index in self._made_at:
            self._change(result)
        return result
