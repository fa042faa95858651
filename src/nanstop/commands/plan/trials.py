"""Trials of precision plans.

Each is a recorded run of the calibration batches, undone, held against float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from nanstop.commands.plan.narrow_values import Key, measured, narrow_values
from nanstop.commands.plan.outcome import (
    MIN_HEADROOM,
    Exact,
    PlanOutcome,
    at_other_scale,
    exact_of,
    outcome_of,
    worse,
)
from nanstop.commands.plan.updates import UpdateTrial, UpdateTrials
from nanstop.measure.ranges import headroom_bits
from nanstop.numerics.tensors import format_name
from nanstop.records import Atom, PrecisionPlan
from nanstop.remedies.apply import applied
from nanstop.remedies.plan import planned
from nanstop.remedies.precision import reference
from nanstop.replay.conditions import Under
from nanstop.replay.step import ModelView, Step
from nanstop.replay.undo import attributes_kept
from nanstop.tracing.record_step import Recording, record

_SCALES = 2.0**-10, 2.0**16
"""The smallest loss scale that is tried, and GradScaler's own, above which nothing is gained."""


class ScaledStep(Step, Protocol):
    """A step whose loss is multiplied by ``scale`` before its backward.

    ``update`` divides the gradients by it.
    """

    scale: float


class PlanTrials:
    """Tries plans on the batches of a step.

    ``scale``: the loss scale, found along the way; 1 where none is needed. ``tuned``: the batches
    that every plan is tried on; ``held``: those that a plan which passes there still has to pass
    on. ``made_up``: how many of the last batches were derived from others: those that float32
    cannot run are left out.
    """

    def __init__(
        self, step: ScaledStep, *, dtype: torch.dtype, updates: int, made_up: int = 0
    ) -> None:
        self.step = step
        self.dtype = dtype
        self.updates = updates
        self.base = PrecisionPlan()
        self.num_looks = 0
        self.scales = dtype is torch.float16
        self._outcomes: dict[PrecisionPlan, PlanOutcome] = {}
        self._trials: dict[tuple[PrecisionPlan, int, float], PlanOutcome] = {}
        self._seen_along: dict[tuple[PrecisionPlan, float], UpdateTrial] = {}
        self._wide: dict[str, dict[Key, tuple[float, ...]]] = {}
        self._exact = self._exact_runs(made_up)
        given = [micro for micro in self._exact if micro < len(step.batches) - made_up]
        self.tuned = given[: len(given) - len(given) // 2]
        self.held = [micro for micro in self._exact if micro not in self.tuned]
        wide = self._ranges("").items()
        self.scale = self._scale_for(
            max(
                (size for key, sizes in wide if key[1] == "backward" for size in sizes), default=0.0
            )
        )
        grads = {micro: one.grads for micro, one in self._exact.items()}
        self._along = UpdateTrials(step, updates, exact=self._under_exact(""), grads=grads)

    @property
    def batches(self) -> tuple[int, ...]:
        """Return every batch that float32 ran."""
        return tuple(self._exact)

    @property
    def dtype_name(self) -> str:
        return format_name(self.dtype)

    @property
    def model_name(self) -> str:
        model = getattr(self.step.view, "model", self.step.view.root)
        return type(model).__name__

    def forward_modules(self) -> tuple[str, ...]:
        """Return the modules that compute, in the order of their first operation."""
        return self._order

    def look(self, plan: PrecisionPlan) -> PlanOutcome:
        """Return what a plan does to loss, gradients and headroom on the batches that plans are
        tried on.
        """
        if plan not in self._outcomes:
            self.num_looks += 1
            outcome = self._tried(plan, self.tuned)
            fit = self._scale_for(outcome.largest)
            if fit < self.scale or (fit > self.scale and not outcome.passes):
                self.scale = fit
                outcome = self._tried(plan, self.tuned)
            self._outcomes[plan] = outcome
        return self._outcomes[plan]

    def holds(self, plan: PrecisionPlan) -> bool:
        """Return whether a plan passes on the held out batches too.

        The first where it does not is tried from now on.
        """
        for micro in self.held:
            outcome = self._trial(plan, micro)
            if self._scale_for(outcome.largest) < self.scale:
                self.scale = self._scale_for(outcome.largest)
                outcome = self._trial(plan, micro)
            if not outcome.passes:
                self.held.remove(micro)
                self.tuned.append(micro)
                self._outcomes.clear()
                return False
        return True

    def settle(self, plan: PrecisionPlan) -> PlanOutcome:
        """Return what a plan that passes shows on all batches, at the largest loss scale that
        its gradients have room for.
        """
        before = self.scale
        known = [self._known(plan, micro) or self._trial(plan, micro) for micro in self._exact]
        self.scale = self._scale_for(max(one.largest for one in known))
        outcome = self._tried(plan, self._exact)
        if not outcome.passes:
            self.scale = before
            outcome = self._tried(plan, self._exact)
        return outcome

    def along_updates(self, plan: PrecisionPlan) -> UpdateTrial:
        """Return how a few updates under a plan, not recorded, compare with float32."""
        key = plan, self.scale
        if key not in self._seen_along:
            with self._scaled():
                self._seen_along[key] = self._along.along_updates(self._under(plan))
        return self._seen_along[key]

    def product_share(self, plan: PrecisionPlan, inside: Callable[[str], bool]) -> float:
        """Return the share of the matrix products in the plan's format, of modules that
        ``inside`` picks.
        """
        work = [one for name, one in self.look(plan).products.items() if inside(name)]
        total = sum(every for _, every in work)
        return sum(narrow for narrow, _ in work) / total if total else 0.0

    def _exact_runs(self, made_up: int) -> dict[int, Exact]:
        found: dict[int, Exact] = {}
        sizes = self._wide[""] = {}
        num_given = len(self.step.batches) - made_up
        for micro in range(len(self.step.batches)):
            run = measured(self.step, micro, under=self._under_exact(""), sizes=sizes)
            try:
                found[micro] = exact_of(run)
            except Exception:
                if micro < num_given:
                    raise
                continue
            if micro == 0:
                self._order = _modules_in_order(run)
        return found

    def _under(self, plan: PrecisionPlan) -> Under:
        return partial(planned, self.step.view, plan)

    def _under_exact(self, attention: str) -> Under:
        return partial(_exactly, self.step.view, attention)

    def _ranges(self, attention: str) -> dict[Key, tuple[float, ...]]:
        """Return the sizes that float32 has with an attention kernel, "" for the model's own."""
        if attention not in self._wide:
            sizes = self._wide[attention] = {}
            for micro in self._exact:
                measured(self.step, micro, under=self._under_exact(attention), sizes=sizes)
        return self._wide[attention]

    @contextmanager
    def _scaled(self) -> Iterator[None]:
        with attributes_kept([(self.step, "scale")]):
            self.step.scale = self.scale
            yield

    def _tried(self, plan: PrecisionPlan, micros: Iterable[int]) -> PlanOutcome:
        """Return what a plan shows at the present scale, up to the first batch where it fails."""
        worst: PlanOutcome | None = None
        for micro in micros:
            outcome = self._trial(plan, micro)
            worst = outcome if worst is None else worse(worst, outcome)
            if not outcome.passes:
                break
        assert worst is not None
        return worst

    def _trial(self, plan: PrecisionPlan, micro: int) -> PlanOutcome:
        key = plan, micro, self.scale
        if key not in self._trials:
            before = self._known(plan, micro)
            known = at_other_scale(before, self.dtype, self.scale) if before is not None else None
            self._trials[key] = known or self._run(plan, micro)
        return self._trials[key]

    def _known(self, plan: PrecisionPlan, micro: int) -> PlanOutcome | None:
        """Return what a plan has shown on a batch, at any loss scale."""
        seen = (one for (of, at, _), one in self._trials.items() if (of, at) == (plan, micro))
        return next(seen, None)

    def _run(self, plan: PrecisionPlan, micro: int) -> PlanOutcome:
        with self._scaled():
            run = record(self.step, micro, under=self._under(plan), keep_grads=True)
        values = narrow_values(run, self._ranges(plan.attention), self.dtype)
        return outcome_of(run, values, self._exact[micro], self.dtype, self.scale)

    def _scale_for(self, largest: float) -> float:
        """Return the largest power of two that leaves gradients of this size their headroom."""
        if not self.scales:
            return 1.0
        low, high = _SCALES
        if not 0.0 < largest < math.inf:
            return high
        room = math.floor(headroom_bits(largest, self.dtype_name) - MIN_HEADROOM)
        return min(max(2.0**room, low), high)


@contextmanager
def _exactly(view: ModelView, attention: str) -> Iterator[None]:
    """Have the whole model in float32, with an attention kernel where one is named."""
    kernel: Sequence[Atom] = [Atom(remedy="attention", value=attention)] if attention else ()
    with reference(view), applied(view, kernel):
        yield


def _modules_in_order(run: Recording) -> tuple[str, ...]:
    return tuple(dict.fromkeys(op.module for op in run.trace.ops if op.phase == "forward"))
