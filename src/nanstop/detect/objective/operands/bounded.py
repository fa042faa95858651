"""Whether a cross entropy would be lower of scores that what makes them cannot reach.

A sigmoid before a cross entropy leaves scores between 0 and 1. Whether that bounds the loss is for
the loss to say: of soft targets, of rankings, the best scores can lie there. Three experiments,
each the first micro-batch run again, undone: what the numbers become where those behind them are
far off, which class of each row the loss wants more of, and how it answers to scores for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nanstop.records import op_name
from nanstop.tracing.op_patches import LookOfSome, SecondRun
from nanstop.tracing.record_step import first_loss, look_again

if TYPE_CHECKING:
    from nanstop.replay.step import Step

FAR = 8.0
"""A number behind the scores, and its opposite, by which they are to be next to 1 and 0."""
NEXT_TO = 0.1
OTHERS = (1.0, 3.0, -2.0)
"""Scores of the wanted class: those ``FAR`` off and 0 settle what these are held against."""
SAME = 1e-2
"""Of what the loss changes by."""
LOST = 0.2
"""Of the loss at its best between 0 and 1, by how much other scores are to be better."""
_FORWARD, _BACKWARD = "_log_softmax", "_log_softmax_backward_data"


def are_bounded(step: Step, read_at: int, made_at: int) -> bool:
    """Return whether each score that the log-softmax ``read_at`` reads goes from 0 to 1 with what
    the op ``made_at`` makes, and the loss is a cross entropy of one class a row that would be lower
    of others. Undone bitwise; runs the micro-batch nine times.
    """
    with suppress(Exception):  # the script's own code may refuse such numbers
        low, high = (_ends(step, read_at, made_at, to) for to in (-FAR, FAR))
        if not (low[0] >= 0.0 and low[1] <= NEXT_TO and 1.0 - NEXT_TO <= high[0] <= high[1] <= 1.0):
            return False
        wanted = _Wanted(read_at)
        look_again(step, 0, wanted)
        return wanted.classes is not None and _is_short(step, read_at, wanted.classes, wanted.width)
    return False


def _is_short(step: Step, read_at: int, classes: Tensor, width: int) -> bool:
    """Return whether the loss, as a function of one score s of all wanted classes where others have
    0, is a + b (log(1 + (width - 1) exp(-s)) + c s), and lower for some s above 1 than for 1.
    """

    def lost(score: float) -> float:
        return first_loss(step, _Scored(read_at, classes, score))

    far = FAR + math.log(width - 1)
    zero, up, down = lost(0.0), lost(far), lost(-far)
    start = _surprise(0.0, width)
    # The sum of both ends says nothing of c, their difference nothing of a.
    bend = _surprise(far, width) + _surprise(-far, width) - 2.0 * start
    size = (up + down - 2.0 * zero) / bend
    slope = ((up - down) - size * (_surprise(far, width) - _surprise(-far, width))) / (2.0 * far)

    def meant(score: float) -> float:
        return zero + size * (_surprise(score, width) - start) + slope * score

    if not size > SAME * abs(zero) or slope < -SAME * size:
        return False
    if max(abs(lost(score) - meant(score)) for score in OTHERS) > SAME * size:
        return False
    best = min(meant(1.0 + (far - 1.0) * share / FAR) for share in range(int(FAR) + 1))
    return meant(1.0) - best > LOST * abs(meant(1.0))


def _surprise(score: float, width: int) -> float:
    """Return the cross entropy of a class with this score among ``width`` - 1 others of 0."""
    return math.log1p((width - 1) * math.exp(-score))


class _Wanted(LookOfSome):
    """Keeps where a class's score is to rise, as ``classes`` of 0 and 1 in the shape of the scores
    that the op ``index`` reads; None where that is not one class of each row that has a gradient.
    """

    ops = frozenset({_FORWARD, _BACKWARD})
    in_backward = None

    def __init__(self, index: int) -> None:
        self.classes: Tensor | None = None
        self.width = 0
        self._index = index
        self._made: StorageWeakRef | None = None

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if index == self._index:
            self.width = args[0].shape[args[1]]
            return self._keep
        is_back = op_name(str(func)) == _BACKWARD and self._made is not None
        if is_back and StorageWeakRef(args[1].untyped_storage()) == self._made:
            return lambda gradient: self._read(gradient.detach(), args[2])
        return None

    def _keep(self, made: Tensor) -> None:
        self._made = StorageWeakRef(made.untyped_storage())

    def _read(self, gradient: Tensor, dim: int) -> None:
        rises, counts = gradient < 0.0, (gradient != 0.0).any(dim)
        one_each = bool((rises.sum(dim)[counts] == 1).all()) and bool(counts.any())
        self.classes = rises.to(torch.float32) if one_each else None


class _Scored(SecondRun):
    """Has one op read a score for some classes, and 0 for the others."""

    def __init__(self, read_at: int, classes: Tensor, score: float) -> None:
        super().__init__()
        self._read_at, self._classes, self._score = read_at, classes, score

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index == self._read_at:
            args = ((self._score * self._classes).to(args[0]), *args[1:])
        return func(*args, **kwargs)


def _ends(step: Step, read_at: int, made_at: int, to: float) -> tuple[float, float]:
    """Return the extremes of what an op reads where all that another one makes is one number."""
    run = _Filled(read_at, made_at, to)
    first_loss(step, run)
    return run.ends


class _Filled(SecondRun):
    def __init__(self, read_at: int, made_at: int, to: float) -> None:
        super().__init__()
        self.ends = (math.nan, math.nan)
        self._read_at, self._made_at, self._to = read_at, made_at, to

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index == self._read_at:
            low, high = torch.aminmax(args[0].detach())
            self.ends = float(low), float(high)
        result = func(*args, **kwargs)
        return result.fill_(self._to) if index == self._made_at else result
