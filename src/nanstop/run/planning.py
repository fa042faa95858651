"""The precision plan of a model: calibrate in float32, search, verify along a few updates, count the cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from nanstop.core.headroom import Narrow
from nanstop.records import (
    Agreement,
    Calibration,
    PlanCost,
    PrecisionPlan,
    Region,
    ScalerSettings,
)
from nanstop.remedies.storage import HALF, stored_in
from nanstop.run.plan_bench import Bench, ScaledStep, Shown
from nanstop.run.plan_terrain import Layout, layout_of
from nanstop.search.plan import Found, Look, smallest_region
from nanstop.search.prove import Budget

__all__ = ["ScaledStep", "plan_precision"]

_TRIALS = 400
_SHARE = 0.1
"""With less of the blocks' matrix products than this left in the narrow format, there is nothing to gain from it."""


def plan_precision(
    step: ScaledStep,
    *,
    dtype: str = "float16",
    updates: int = 3,
    seconds: float = 60.0,
    calibration: Calibration,
    clock: Callable[[], float] = time.monotonic,
) -> PrecisionPlan:
    """Return the smallest plan under which the step agrees with float32 in ``dtype``, or why there is none.

    ``step``: calibration batches as its window. Everything is undone. Synchronises the device. Errors: what the step
    raises in float32, as it is.
    """
    began = clock()
    bench = Bench(step, dtype=getattr(torch, dtype), updates=updates)
    search = _Search(bench, seconds, clock)
    plan = search.plan()
    done = replace(
        calibration,
        trials=bench.num_looks,
        seconds=clock() - began,
        complete=search.complete,
    )
    return replace(plan, calibration=done)


class _Search:
    """One search: what is tried, and what is made of what was found."""

    def __init__(self, bench: Bench, seconds: float, clock: Callable[[], float]) -> None:
        self.bench = bench
        self.layout: Layout = layout_of(bench.step.view.root, bench.forward_modules())
        self.clock = clock
        self.end = clock() + seconds
        self.complete = True

    def plan(self) -> PrecisionPlan:
        stored = stored_in(self.bench.step.view, HALF)
        half = any(parameter.requires_grad for parameter in stored)
        if half and self.bench.dtype is torch.bfloat16:
            found = self._found("")
            if found is not None:
                return self._accepted(found)
            why = self.bench.walk(self._with(())).why
        else:
            why = "float16 holds neither AdamW's eps nor small updates" if half else ""
        found = self._found("float32", why)
        return self._refused() if found is None else self._accepted(found)

    def _found(self, trainables: str, why: str = "") -> Found[str] | None:
        """Return the smallest region with trainables kept so; None where there is none."""
        self.bench.base = PrecisionPlan(
            model=self.bench.model_name,
            dtype=self.bench.dtype_name,
            trainables=trainables,
            trainables_reason=why,
        )
        found = self._region()
        if found is None or not self.bench.walk(self._with(found.items)).why:
            return found
        # Some regions show in the updates alone; what is lost in storage no region brings back.
        return self._region(thorough=True) if trainables else None

    def _region(self, *, thorough: bool = False) -> Found[str] | None:
        def run(items: tuple[str, ...]) -> Look[str]:
            plan = self._with(items)
            shown = self.bench.look(plan)
            passes = shown.passes and not (thorough and self.bench.walk(plan).why)
            return Look(passes, self._suspects(shown, items))

        left = Budget(trials=_TRIALS, seconds=max(self.end - self.clock(), 0.0), clock=self.clock)
        return smallest_region(run, self.layout.terrain, budget=left)

    def _suspects(self, shown: Shown, items: tuple[str, ...]) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for narrow in shown.pressed:
            places = [narrow.module]
            if self.layout.is_container(narrow.module):
                places = self._sources(narrow)
            found |= dict.fromkeys(places)
        if not found:
            found = dict.fromkeys(
                name for name in shown.blamed if not self.layout.is_container(name)
            )
        return tuple(name for name in found if not self.layout.covered(name, items))

    def _sources(self, narrow: Narrow) -> list[str]:
        """Return the modules whose float32 outputs would make a container's own operation compute in float32."""
        large = [name for name, size in narrow.made_of if size > narrow.absmax / 4]
        read = large or [name for name, _ in narrow.made_of]
        return [name for name in read if not self.layout.is_container(name)]

    def _with(self, items: tuple[str, ...]) -> PrecisionPlan:
        """Return the plan whose float32 regions are these modules."""
        head = self.bench.step.view.head()
        runs = self.layout.runs(tuple(item for item in items if item != head))
        return replace(
            self.bench.base,
            regions=tuple(Region(modules=run) for run in runs),
            logits="float32" if head in items else self.bench.dtype_name,
        )

    def _accepted(self, found: Found[str]) -> PrecisionPlan:
        self.complete = found.minimal
        plan = self._with(found.items)
        share = self.bench.product_share(plan, self.layout.in_block)
        if share < _SHARE and found.items:
            return replace(self.bench.base, reason=self._nothing_left(found.items))
        regions = tuple(
            replace(region, reason=self._without(found.items, region)) for region in plan.regions
        )
        cost = self._cost(plan)
        shown = self.bench.settle(plan)
        walk = self.bench.walk(plan)
        worst = shown.worst
        return replace(
            plan,
            regions=regions,
            loss=shown.loss_dtype,
            scaler=ScalerSettings(init_scale=self.bench.scale) if self.bench.scales else None,
            agreement=Agreement(
                loss_gap=shown.loss_gap,
                grad_cosine=shown.cosine,
                num_updates=self.bench.updates,
                update_loss_gap=walk.loss_gap,
                update_share=walk.share,
                headroom_bits=shown.headroom_bits,
                headroom_at=worst.module if worst is not None else "",
                matmul_share=self.bench.product_share(plan, lambda _: True),
            ),
            cost=cost,
        )

    def _without(self, items: tuple[str, ...], region: Region) -> str:
        """Return what goes wrong when a region is taken out again."""
        rest = tuple(item for item in items if item not in region.modules)
        plan = self._with(rest)
        return self.bench.look(plan).why or self.bench.walk(plan).why

    def _cost(self, plan: PrecisionPlan) -> PlanCost:
        plain, planned = self.bench.look(self._with(())), self.bench.look(plan)
        return PlanCost(casts=planned.casts - plain.casts, bytes=planned.bytes - plain.bytes)

    def _nothing_left(self, items: tuple[str, ...]) -> str:
        why = self.bench.look(self._with(())).why
        return (
            f"less than {_SHARE:.0%} of the blocks' matrix products could stay in it: "
            f"{len(items)} modules have to be float32 ({why})"
        )

    def _refused(self) -> PrecisionPlan:
        if self.clock() >= self.end:
            reason = f"none was found in {self.bench.num_looks} trials, and the time was up"
            return replace(self.bench.base, reason=reason)
        plan = self._with(self.layout.units)
        why = self.bench.look(plan).why or self.bench.walk(plan).why
        reason = f"it fails even with every module of every block in float32 ({why})"
        return replace(self.bench.base, reason=reason)
