"""A failure that earlier updates led to: they are made anew from a snapshot on, under remedies of
updates.

Where training runs away, the step that fails is only where it ends: no change of that step cures
it. What the updates before it should have been is found by making them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

from nanstop.decide.policy import Policy, not_allowed
from nanstop.numerics.tensors import in_float64, nonfinite
from nanstop.numerics.update_length import TOO_LONG
from nanstop.numerics.weights import taken_step
from nanstop.prove.bench import Budget
from nanstop.prove.failing_step import FailingStep, WayBack, mean_loss
from nanstop.prove.search import prove
from nanstop.records import Atom, FailureKey, Proof, Reference, StepLength, Trial
from nanstop.records.remedies import safety_of
from nanstop.records.vocabulary import OF_UPDATES
from nanstop.remedies.apply import applied
from nanstop.replay.conditions import Under
from nanstop.replay.rerun import attempt
from nanstop.replay.step import Step, trainable_of
from nanstop.wording import counted

LEAST_UPDATES = 20
"""How many updates a remedy must stand: where fewer led to the failure, its windows come again."""
_MOST_UPDATES = 128
_NUM_JUDGED = 4
"""The last windows, whose mean loss says what the updates came to."""
_GROWN = 10.0
"""Times the usual loss, from which on a run has begun to run away."""
_SMALLER = 0.1
_LEAST_FACTOR = 1e-12
_STANDS_STILL = Atom(remedy="lr", value="0")


@dataclass(frozen=True, slots=True)
class Course:
    """The updates from a snapshot up to a step that fails with the weights they led to. ``apart``:
    the window that no loss is judged by.
    """

    way_back: WayBack
    failing: FailingStep
    apart: int | None = None

    @property
    def step(self) -> Step:
        """The step that fails."""
        return self.failing.step

    @property
    def num_updates(self) -> int:
        """How many updates are made anew."""
        return max(LEAST_UPDATES, len(self.way_back.steps))

    def taken_step(self, lr: float) -> StepLength | None:
        """Return how far each of the updates has moved weights, beside what they were at the
        snapshot; None where that is not known. Synchronises the device.
        """
        trained = [*trainable_of(self.step.view).parameters.values()]
        return taken_step(trained, lr, len(self.way_back.steps), self.way_back.rewound)

    def begin(self) -> float:
        """Return the loss of the last windows at the snapshot, NaN where the step fails there."""
        with self.way_back.rewound():
            fails = any(attempt(self.step, micro).failed for micro in self.failing.micros)
            return math.nan if fails else self._judged()

    def end(
        self, under: Under, *, in_proportion: bool = True, leaves_out: bool = False
    ) -> tuple[float, float]:
        """Return the loss of the last windows after all updates under a context, NaN where one of
        theirs is not finite; and how many times as long the first update makes the weights that is
        out of all proportion to them, after which none is made, or 0 (always where that is not
        asked for: ``in_proportion``). ``leaves_out``: the window ``apart``. Everything is undone.
        Synchronises the device.
        """
        with self.way_back.rewound(), under():
            size = self._size()
            windows = self._others() if leaves_out else self._all()
            for step in islice(cycle(windows), self.num_updates):
                with step.isolated():
                    if not math.isfinite(mean_loss(step)):
                        return math.nan, 0.0
                    step.update()
                before, size = size, self._size()
                is_long = math.isfinite(size) and size > TOO_LONG * before > 0.0
                if is_long and in_proportion:
                    return self._judged(), size / before
            broken = nonfinite(trainable_of(self.step.view).parameters)
            return math.nan if broken else self._judged(), 0.0

    def _size(self) -> float:
        """Return the 2-norm of all that is trained."""
        trained = trainable_of(self.step.view).parameters.values()
        return math.hypot(*(float(in_float64(p.detach()).norm()) for p in trained))

    def _all(self) -> tuple[Step, ...]:
        return (*self.way_back.steps, self.step)

    def _others(self) -> tuple[Step, ...]:
        return tuple(step for step in self._all() if step.id.step != self.apart)

    def _judged(self) -> float:
        losses = []
        for step in self._others()[-_NUM_JUDGED:]:
            with step.isolated():
                losses.append(mean_loss(step))
        return sum(losses) / len(losses)


def prove_course(
    course: Course,
    key: FailureKey,
    candidates: Sequence[tuple[Atom, ...]],
    *,
    policy: Policy,
    usual: float | None = None,
    tried: Callable[[Trial], None] = lambda _: None,
) -> Proof | None:
    """Return the remedy under which the updates do not run away: all of their losses are finite,
    and the last are no larger than at the snapshot. None where that cannot be asked; where the step
    fails at the snapshot, too, no remedy of updates is tried. ``usual``: the loss that the run had
    before it grew; a snapshot of when it had grown already tells nothing of what led there.

    ``candidates`` change nothing but updates. A learning rate that is still too large is tried with
    a tenth of it. Call where weights are as the failing step has them.
    """
    if len(course.way_back.steps) > _MOST_UPDATES:
        return None
    begin = course.begin()
    if usual is not None and math.isfinite(begin) and begin > _GROWN * max(usual, 1.0):
        return None
    if not math.isfinite(begin):
        there = Trial(atoms=(_STANDS_STILL,), outcome="same_failure", key=key, loss=begin)
        return Proof(
            incident="", verdict="none_found", minimal=(), tried=(there,), scope=OF_UPDATES
        )

    def trial(atoms: tuple[Atom, ...], _micro: int | None = None) -> Trial:
        ended = _trial(course, atoms, begin, key)
        tried(ended)
        return ended

    proof = prove(
        trial(()),
        candidates,
        trial,
        reference=Reference(outcome="same_failure", source="the updates as they were"),
        safety_of=safety_of,
        extend=_smaller_rate,
        anew=trial,
        permitted=lambda atoms: not not_allowed(policy, atoms),
        budget=Budget(trials=policy.budget_trials, seconds=policy.budget_seconds),
    )
    return replace(proof, scope=OF_UPDATES)


def _trial(course: Course, atoms: tuple[Atom, ...], begin: float, key: FailureKey) -> Trial:
    began = time.perf_counter()
    under = partial(applied, course.step.view, atoms)
    end, times = course.end(under, in_proportion=bool(atoms))
    passes, is_finite = end <= begin and not times, math.isfinite(end)
    first = course.way_back.steps[0].id.step if course.way_back.steps else course.step.id.step
    to = f"to {end:.4g}" if is_finite else "to what is not finite"
    message = (
        f"in {counted(course.num_updates, 'update')} from step {first} on the loss goes from "
        f"{begin:.4g} {to}"
    )
    if times:
        message = f"an update from step {first} on makes the weights {times:.3g} times as long"
    return Trial(
        atoms=atoms,
        outcome="pass" if passes else "other_failure" if is_finite else "same_failure",
        key=None if passes else key,
        loss=end,
        rows_unchanged=passes or None,  # forward and backward are as they were
        seconds=time.perf_counter() - began,
        message=message,
    )


def _smaller_rate(trial: Trial) -> tuple[Atom, ...] | None:
    (atom,) = trial.atoms
    factor = _SMALLER * float(atom.value) if atom.remedy == "lr" else 0.0
    return (replace(atom, value=f"{factor:.6g}"),) if factor >= _LEAST_FACTOR else None
