"""Schedules of learning rates, and what they will give.

A schedule that has run out, or that gives 0 for good, is told from one that pauses by asking a copy
of it: what it will give is what it gives when it is stepped. What the script remembers meanwhile is
undone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from nanstop.diagnose.findings.setup.ns113_hyperparameter_out_of_range import DEAD
from nanstop.living import living
from nanstop.numerics.optimizer_state import innermost
from nanstop.records import RateFacts
from nanstop.replay.conditions import unspoken, unwarned
from nanstop.replay.rng import rng_kept
from nanstop.replay.script_objects import reaches_iterator, script_objects_kept

if TYPE_CHECKING:
    from torch.optim import Optimizer

AHEAD = 1000
"""Steps of a schedule that are asked for, and again as many as long as its rate rises."""
MOST_PLANNED = 20_000
"""Steps of a training whose rates are all asked for: a tenth of a second."""


def planned(schedule: Any, num_steps: int) -> RateFacts | None:
    """Return the rates that a schedule at its beginning gives a training of some steps, and those
    that it gives afterwards; None where it cannot be asked.
    """
    while "scheduler" in vars(schedule):  # accelerate's wrapper
        schedule = vars(schedule)["scheduler"]
    if not isinstance(schedule, LRScheduler) or schedule.last_epoch > 0 or num_steps > MOST_PLANNED:
        return None
    rates = asked(schedule, num_steps + AHEAD)
    if not rates:
        return None
    used, coming = rates[:num_steps], rates[num_steps:]
    dead = 0
    while dead < num_steps and 0.0 <= used[-1 - dead] <= DEAD * max(used):
        dead += 1
    return RateFacts(
        num_used=num_steps,
        num_dead=dead,
        highest=max(used),
        coming=max(coming),
        planned=True,
        lowest=min(0.0, *used),
    )


def schedules_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedules that act on an optimizer by themselves. Walks all objects there are."""
    optimizer = innermost(optimizer)
    found = [
        one
        for one in living(LRScheduler)
        if innermost(getattr(one, "optimizer", None)) is optimizer
    ]
    parts = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    return [one for one in found if id(one) not in parts]


def asked(schedule: Any, num_steps: int) -> list[float]:
    """Return the highest rate of all groups now and after each of the next steps of a schedule.

    A copy is stepped, whose optimizer has rates and no weights. Empty where it cannot be copied or
    stepped without more than that, or reads an iterator of the script's that has no copy.
    """
    rates = followed(schedule, lambda rates: len(rates) >= num_steps)
    return rates if len(rates) == num_steps else []


def followed(schedule: Any, is_over: Callable[[Sequence[float]], bool]) -> list[float]:
    """Return the rates as ``asked`` does, until ``is_over`` of them, or until one is not finite."""
    groups = [
        {k: v for k, v in g.items() if k != "params"} for g in schedule.optimizer.param_groups
    ]
    # A script's function of the step may count its calls, or remember the best of something.
    parts = [schedule, *getattr(schedule, "_schedulers", ())]
    rates: list[float] = []
    if reaches_iterator(parts):
        return rates
    try:
        with rng_kept(), unspoken(), unwarned(), script_objects_kept(parts):
            stand_in = _WithoutWeights(copy.deepcopy(groups))
            mine = copy.deepcopy(schedule, {id(schedule.optimizer): stand_in})
            rates = [max(rates_in(stand_in.param_groups))]
            while not is_over(rates):
                mine.step()
                rates.append(max(rates_in(stand_in.param_groups)))
                if not math.isfinite(rates[-1]):  # told at its own update
                    return rates[:-1]
    except Exception:  # one that waits for a metric, holds what cannot be copied, or has an end
        return rates if len(rates) > 1 else []
    return rates


class _WithoutWeights:
    """What a schedule needs of an optimizer."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups

    def step(self) -> None:
        """Do nothing."""


def rates_in(groups: Sequence[dict[str, Any]]) -> list[float]:
    """Return the rates of an optimizer's groups, but for those that lie on a device."""
    found: list[float] = []
    for group in groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate = float(rate) if rate.device.type == "cpu" else None
        if isinstance(rate, (int, float)):
            found.append(float(rate))
    return found
