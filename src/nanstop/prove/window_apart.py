"""The batch that sent a training off: one window before the failure whose loss was far from that of
the others with the same weights, and without whose update the others' do not run away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median

from nanstop.prove.course import Course
from nanstop.prove.failing_step import FailingStep, mean_loss
from nanstop.records import BatchFact, WindowApart
from nanstop.replay.batches import batch_facts
from nanstop.replay.step import Step

_FAR = 1e3
"""Times the others' usual loss: those of batches of one data set are within a factor of a few."""
_RECOVERED = 10.0
"""Times that loss, below which training has come back from what it met."""
_FEWEST, _MOST = 3, 128
"""Windows since the snapshot."""


def window_apart(failing: FailingStep) -> WindowApart | None:
    """Return the window that led to a failure, None where no one did: its loss stood out when it
    was met and does so with the weights of the snapshot, all losses since are large, and the
    updates of the others, made anew without its own, end with losses that are finite and no larger
    than at the snapshot.

    Call where weights are as the failing step has them. Synchronises the device.
    """
    way_back = failing.way_back
    steps = way_back.steps if way_back is not None else ()
    if way_back is None or not _FEWEST <= len(steps) <= _MOST or not _rose(steps):
        return None
    with way_back.rewound():
        losses = [_loss(step) for step in steps]
    place = max(range(len(steps)), key=lambda n: losses[n])
    others = [loss for n, loss in enumerate(losses) if n != place]
    if not math.isfinite(losses[place]) or losses[place] < _FAR * max(others) or not max(others):
        return None
    if any(_met(step) < _RECOVERED * max(others) for step in steps[place + 1 :]):
        return None
    left_out = Course(way_back, failing, apart=steps[place].id.step)
    begin, (end, times) = left_out.begin(), left_out.end(nullcontext, leaves_out=True)
    if times or not end <= begin:
        return None
    return WindowApart(
        step=steps[place].id.step,
        loss=losses[place],
        usual=median(others),
        begin=begin,
        end=end,
        num_updates=left_out.num_updates,
        fact=_farthest(steps[place]),
    )


def _rose(steps: Sequence[Step]) -> bool:
    """Return whether some window was met with a loss far from that of all before it."""
    highest = 0.0
    for loss in map(_met, steps):
        if loss >= _FAR * highest > 0.0:
            return True
        highest = max(highest, loss)
    return False


def _met(step: Step) -> float:
    """Return the largest loss of a window as the run has met it."""
    return max((abs(float(one)) for one in step.losses if one is not None), default=0.0)


def _loss(step: Step) -> float:
    with step.isolated():
        return abs(mean_loss(step))


def _farthest(step: Step) -> BatchFact | None:
    """Return the entry of a window's batches whose largest sample is farthest from the others."""
    facts = [fact for n, batch in enumerate(step.batches) for fact in batch_facts(batch, n)]
    return max(facts, key=lambda fact: fact.outlier_ratio or 0.0, default=None)
