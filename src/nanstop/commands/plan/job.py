"""The job of ``nanstop plan SCRIPT``: a plan for what the script was about to train."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from nanstop.commands.plan.plan import plan_step
from nanstop.commands.plan.search import plan_precision
from nanstop.errors import NanstopError
from nanstop.process.inject.dry_run_child import Target
from nanstop.records import PrecisionPlan


def run(target: Target, options: Mapping[str, Any]) -> PrecisionPlan:
    """Return the plan of a trainer's first window, or of a raw loop's.

    Errors: ``NanstopError`` where there is none.
    """
    search = partial(plan_precision, **options)
    if target.trainer is not None:
        from nanstop.hosts.trainer.first_window import first_step  # loops need no transformers

        return first_step(target.trainer, lambda step: plan_step(step, search), train=target.train)
    if target.step is None:
        raise NanstopError("no window of this loop can be run again before its first update")
    return plan_step(target.step, search)
