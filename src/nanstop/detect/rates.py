"""The learning rates that an optimizer really uses, and those that its schedule will give it.

A schedule that has run out, or that gives 0 for good, is told from one that pauses by asking a copy
of it: what it will give is what it gives when it is stepped. Nothing of a healthy run is asked.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from nanstop.diagnose.findings.setup.ns113_hyperparameter_out_of_range import DEAD
from nanstop.numerics.optimizer_state import innermost
from nanstop.records import RateFacts
from nanstop.replay.rng import rng_kept

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanstop.replay.step import Step

AHEAD = 1000
"""Steps of a schedule that are asked for."""
MOST_PLANNED = 20_000
"""Steps of a training whose rates are all asked for: a tenth of a second."""
LEAST_DEAD, DEAD_SHARE = 3, 0.1
"""Updates in a row that moved nothing before a schedule is asked, and their share of the others:
a few more steps than were planned for are none of it.
"""
LEAST_RISING = 32
"""Updates of a run from which the end of a warm-up can be told to be out of its reach."""


@dataclass(slots=True)
class _Used:
    """What one optimizer has used. ``num_dead``: the last updates in a row."""

    num: int = 0
    num_dead: int = 0
    highest: float = 0.0
    micros: int = 1
    told: bool = field(default=False)


class Rates:
    """Follows the rates of the optimizers of one run."""

    def __init__(self) -> None:
        self._used: WeakKeyDictionary[Optimizer, _Used] = WeakKeyDictionary()

    def note(self, step: Step) -> RateFacts | None:
        """Note an update that is near; return what became of the rates, once, where most are 0.

        No device work: rates that lie on a device are not read.
        """
        optimizer = step.view.optimizer
        rates = list(_rates(optimizer.param_groups)) if optimizer is not None else []
        if optimizer is None or not rates:
            return None
        used = self._used.setdefault(optimizer, _Used())
        rate = max(rates)
        used.num, used.highest = used.num + 1, max(used.highest, rate)
        used.micros = max(used.micros, len(step.losses))
        used.num_dead = used.num_dead + 1 if rate <= DEAD * used.highest else 0
        least = max(LEAST_DEAD, math.ceil(DEAD_SHARE * (used.num - used.num_dead)))
        if used.num_dead != least or used.told:
            return None
        found = self._asked(optimizer, used)
        used.told = found is not None and found.coming <= DEAD * max(used.highest, 1e-30)
        return found if used.told else None

    def finished(self) -> Iterator[RateFacts]:
        """Yield what is known at the end of a run of rates that stayed at 0, or never came to
        their peak.
        """
        for optimizer, used in list(self._used.items()):
            never = used.num == used.num_dead >= LEAST_DEAD
            rising = used.num >= LEAST_RISING and _may_rise(optimizer, used)
            if not used.told and (never or rising):
                found = self._asked(optimizer, used)
                if found is not None and (never or found.coming > 2 * found.highest):
                    yield found

    def _asked(self, optimizer: Optimizer, used: _Used) -> RateFacts | None:
        schedules = schedules_of(optimizer)
        if len(schedules) != 1:  # by hand, or several that multiply: nobody to be asked
            return None
        (schedule,) = schedules
        coming = asked(schedule, AHEAD)
        if not coming:
            return None
        return RateFacts(
            num_used=used.num,
            num_dead=used.num_dead,
            highest=used.highest,
            coming=max(coming),
            num_schedule_steps=schedule.last_epoch,
            num_micro=used.micros,
        )


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
    while dead < num_steps and used[-1 - dead] <= DEAD * max(used):
        dead += 1
    return RateFacts(
        num_used=num_steps, num_dead=dead, highest=max(used), coming=max(coming), planned=True
    )


def schedules_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedules that act on an optimizer by themselves. Walks all objects there are."""
    optimizer = innermost(optimizer)
    found = [
        one
        for one in gc.get_objects()
        # Not isinstance, which asks proxies of what is gone by now.
        if issubclass(type(one), LRScheduler)
        and innermost(getattr(one, "optimizer", None)) is optimizer
    ]
    parts = {id(part) for one in found for part in getattr(one, "_schedulers", ())}
    return [one for one in found if id(one) not in parts]


def asked(schedule: Any, num_steps: int) -> list[float]:
    """Return the highest rate of all groups now and after each of the next steps of a schedule.

    A copy is stepped, whose optimizer has rates and no weights. Empty where it cannot be copied or
    stepped without more than that.
    """
    groups = [
        {k: v for k, v in g.items() if k != "params"} for g in schedule.optimizer.param_groups
    ]
    try:
        with rng_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stand_in = _WithoutWeights(copy.deepcopy(groups))
            mine = copy.deepcopy(schedule, {id(schedule.optimizer): stand_in})
            rates = [max(_rates(stand_in.param_groups))]
            for _ in range(num_steps - 1):
                mine.step()
                rates.append(max(_rates(stand_in.param_groups)))
    except Exception:  # one that waits for a metric, or holds what cannot be copied
        return []
    return rates


class _WithoutWeights:
    """What a schedule needs of an optimizer."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups

    def step(self) -> None:
        """Do nothing."""


def _rates(groups: Sequence[dict[str, Any]]) -> Iterator[float]:
    for group in groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate = float(rate) if rate.device.type == "cpu" else None
        if isinstance(rate, (int, float)):
            yield float(rate)


def _may_rise(optimizer: Optimizer, used: _Used) -> bool:
    """Return whether some schedule multiplies a rate far above those that were used."""
    initial = [float(g["initial_lr"]) for g in optimizer.param_groups if "initial_lr" in g]
    return max(initial, default=0.0) > 2 * used.highest
