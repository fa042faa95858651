"""The precision plan of a model.

Calibrate in float32, search, verify along a few updates, count the cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from nanstop.commands.plan.modules import Layout, layout_of
from nanstop.commands.plan.narrow_values import Narrow
from nanstop.commands.plan.outcome import PlanOutcome
from nanstop.commands.plan.regions import Found, RegionTrial, smallest_region
from nanstop.commands.plan.trials import PlanTrials, ScaledStep
from nanstop.numerics.tensors import HALF
from nanstop.process.inject.progress import Progress, tell
from nanstop.prove.bench import Budget
from nanstop.records import (
    Agreement,
    Calibration,
    PlanCost,
    PrecisionPlan,
    Region,
    ScalerSettings,
)
from nanstop.remedies.storage import stored_in

__all__ = ["ScaledStep", "plan_precision"]

_TRIALS = 400
_SHARE = 0.1
"""With less of the blocks' matrix products than this left in the narrow format, there is nothing
to gain from it.
"""


def plan_precision(
    step: ScaledStep,
    *,
    dtype: str = "float16",
    updates: int = 3,
    seconds: float = 60.0,
    made_up: int = 0,
    calibration: Calibration,
    clock: Callable[[], float] = time.monotonic,
) -> PrecisionPlan:
    """Return the smallest plan under which the step agrees with float32 in ``dtype``, or why there
    is none.

    ``step``: calibration batches as its window. Half of them, where there are several, are held out
    until a plan passes on the others, and it has to pass on them too. ``made_up``: how many of the
    last ones are not the user's own; those that float32 cannot run are left out. Everything is
    undone. Synchronises the device. Errors: what the step raises in float32, as it is.
    """
    began = clock()
    trials = PlanTrials(step, dtype=getattr(torch, dtype), updates=updates, made_up=made_up)
    num_unseen = len(trials.held)
    search = _Search(trials, seconds, clock)
    plan = search.plan()
    done = replace(
        calibration,
        trials=trials.num_looks,
        seconds=clock() - began,
        complete=search.complete,
        num_unseen=num_unseen,
        num_padded=len(trials.batches) - calibration.num_batches,
    )
    return replace(plan, calibration=done)


class _Search:
    """One search: what is tried, and what is made of what was found."""

    def __init__(self, trials: PlanTrials, seconds: float, clock: Callable[[], float]) -> None:
        self.trials = trials
        self.layout: Layout = layout_of(trials.step.view.root, trials.forward_modules())
        self.clock = clock
        self.end = clock() + seconds
        self.complete = True

    def plan(self) -> PrecisionPlan:
        stored = stored_in(self.trials.step.view, HALF)
        half = any(parameter.requires_grad for parameter in stored)
        if half and self.trials.dtype is torch.bfloat16:
            found = self._found("")
            if found is not None:
                return self._accepted(found)
            self.trials.base = replace(self.trials.base, attention="")
            why = self.trials.along_updates(self._with(())).why
        else:
            why = "float16 holds neither AdamW's eps nor small updates" if half else ""
        found = self._found("float32", why)
        return self._refused() if found is None else self._accepted(found)

    def _found(self, trainables: str, why: str = "") -> Found[str] | None:
        """Return the smallest region with trainables kept so; None where there is none.

        Leaves its base to the trials.
        """
        own = PrecisionPlan(
            model=self.trials.model_name,
            dtype=self.trials.dtype_name,
            trainables=trainables,
            trainables_reason=why,
        )
        best, base = self._from(own), own
        for kernel in self.trials.step.view.attention_choices():
            other = replace(own, attention=kernel)
            if not self._promises(other, best):
                continue
            found = self._from(other)
            if found is not None and (best is None or len(found.items) < len(best.items)):
                best, base = found, replace(other, attention_reason=self._missing(own, found.items))
        self.trials.base = base
        return best

    def _from(self, base: PrecisionPlan) -> Found[str] | None:
        """Return the smallest region beside ``base`` that passes on every batch, the ones held
        out included.
        """
        self.trials.base = base
        found = self._region()
        if found is None:
            return None
        if not self.trials.holds(self._with(found.items)):
            return self._from(base)
        if not self.trials.along_updates(self._with(found.items)).why:
            return found
        # Some regions show in the updates alone; what is lost in storage no region brings back.
        found = self._region(thorough=True) if base.trainables else None
        if found is None or self.trials.holds(self._with(found.items)):
            return found
        return self._from(base)

    def _promises(self, base: PrecisionPlan, best: Found[str] | None) -> bool:
        """Return whether an attention kernel may do with a smaller region than the one that was
        found without it.

        The plain kernel holds every score in memory: it has to be the only way.
        """
        if best is None or self.clock() >= self.end:
            return best is None and self.clock() < self.end
        if not best.items or base.attention == "eager":
            return False
        self.trials.base = base
        outcome = self.trials.look(self._with(()))
        suspects = self._suspects(outcome, ())
        return outcome.passes or 0 < len(suspects) < len(best.items)

    def _missing(self, base: PrecisionPlan, items: tuple[str, ...]) -> str:
        """Return what goes wrong with these items and without an attention kernel."""
        self.trials.base = base
        return self._why(self._with(items))

    def _why(self, plan: PrecisionPlan) -> str:
        """Return what is wrong with a plan, on any of the batches."""
        return self.trials.look(plan).why or self.trials.along_updates(plan).why

    def _region(self, *, thorough: bool = False) -> Found[str] | None:
        def run(items: tuple[str, ...]) -> RegionTrial[str]:
            plan, num_looks = self._with(items), self.trials.num_looks
            tell(Progress(done=num_looks, seconds_left=max(self.end - self.clock(), 0.0)))
            outcome = self.trials.look(plan)
            passes = outcome.passes and not (thorough and self.trials.along_updates(plan).why)
            return RegionTrial(passes, self._suspects(outcome, items))

        left = Budget(trials=_TRIALS, seconds=max(self.end - self.clock(), 0.0), clock=self.clock)
        return smallest_region(run, self.layout.groups, budget=left)

    def _suspects(self, outcome: PlanOutcome, items: tuple[str, ...]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for narrow in outcome.pressed:
            places = [narrow.module]
            if self.layout.is_container(narrow.module):
                places = self._sources(narrow)
            found |= dict.fromkeys(places)
        if not found:
            found = dict.fromkeys(
                name for name in outcome.blamed if not self.layout.is_container(name)
            )
        return tuple(name for name in found if not self.layout.covered(name, items))

    def _sources(self, narrow: Narrow) -> list[str]:
        """Return the modules whose float32 outputs would make a container's own operation
        compute in float32.
        """
        large = [name for name, size in narrow.made_of if size > narrow.absmax / 4]
        read = large or [name for name, _ in narrow.made_of]
        return [name for name in read if not self.layout.is_container(name)]

    def _with(self, items: tuple[str, ...]) -> PrecisionPlan:
        """Return the plan whose float32 regions are these modules."""
        head = self.trials.step.view.head()
        runs = self.layout.runs(tuple(item for item in items if item != head))
        return replace(
            self.trials.base,
            regions=tuple(Region(modules=run) for run in runs),
            logits="float32" if head in items else self.trials.dtype_name,
        )

    def _accepted(self, found: Found[str]) -> PrecisionPlan:
        self.complete = found.minimal
        plan = self._with(found.items)
        share = self.trials.product_share(plan, self.layout.in_block)
        if share < _SHARE and found.items:
            return replace(self.trials.base, reason=self._nothing_left(found.items))
        outcome, scale = self.trials.settle(plan), self.trials.scale
        along = self.trials.along_updates(plan)
        if outcome.why or along.why:
            why = f"at no loss scale does one plan pass on every batch ({outcome.why or along.why})"
            return replace(self.trials.base, reason=why)
        worst = outcome.worst
        regions = tuple(
            replace(region, reason=self._without(found.items, region.modules))
            for region in plan.regions
        )
        head = tuple(item for item in found.items if item == self.trials.step.view.head())
        return replace(
            plan,
            regions=regions,
            logits_reason=self._without(found.items, head) if head else "",
            loss=outcome.loss_dtype,
            scaler=ScalerSettings(init_scale=scale) if self.trials.scales else None,
            agreement=Agreement(
                loss_gap=outcome.loss_gap,
                grad_cosine=outcome.cosine,
                num_updates=self.trials.updates,
                update_loss_gap=along.loss_gap,
                update_loss_bound=along.bound,
                update_share=along.share,
                headroom_bits=outcome.headroom_bits,
                headroom_at=worst.module if worst is not None else "",
                matmul_share=self.trials.product_share(plan, lambda _: True),
            ),
            cost=self._cost(plan),
        )

    def _without(self, items: tuple[str, ...], some: tuple[str, ...]) -> str:
        """Return what goes wrong when some of the items are taken out again."""
        return self._why(self._with(tuple(item for item in items if item not in some)))

    def _cost(self, plan: PrecisionPlan) -> PlanCost:
        plain, planned = self.trials.look(self._with(())), self.trials.look(plan)
        return PlanCost(casts=planned.casts - plain.casts, bytes=planned.bytes - plain.bytes)

    def _nothing_left(self, items: tuple[str, ...]) -> str:
        why = self.trials.look(self._with(())).why
        return (
            f"less than {_SHARE:.0%} of the blocks' matrix products could stay in it: "
            f"{len(items)} modules have to be float32 ({why})"
        )

    def _refused(self) -> PrecisionPlan:
        if self.clock() >= self.end:
            reason = f"none was found in {self.trials.num_looks} trials, and the time was up"
            return replace(self.trials.base, reason=reason)
        why = self._why(self._with(self.layout.units))
        reason = f"it fails even with every module of every block in float32 ({why})"
        return replace(self.trials.base, reason=reason)
