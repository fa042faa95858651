"""The learning rates that an optimizer really uses, and those that its schedule will give it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

from torch.optim.lr_scheduler import LRScheduler

from nanstop.detect.rates.by_hand import rates_to_come
from nanstop.detect.rates.given import is_as_made
from nanstop.detect.rates.schedules import AHEAD, followed, rates_in, schedules_of
from nanstop.diagnose.findings.setup.ns113_hyperparameter_out_of_range import (
    DEAD,
    LONGEST_WARM_UP,
)
from nanstop.own_code import is_library
from nanstop.records import RateFacts
from nanstop.tracing.places import user_frame

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanstop.replay.step import Step

LEAST_DEAD, DEAD_SHARE = 3, 0.1
"""Updates in a row that moved nothing before a schedule is asked, and their share of the others:
a few more steps than were planned for are none of it.
"""
FIRST_LOOK = 16
"""Updates after which a schedule is asked when its warm-up ends."""
_FURTHER = (
    LONGEST_WARM_UP // 2,
    LONGEST_WARM_UP,
    10_000 * LONGEST_WARM_UP,
    20_000 * LONGEST_WARM_UP,
)
"""Steps ahead for which a script's own expression of its rate is computed."""
RARELY = 4
"""Updates a step of a schedule from which it is stepped rarely: for each epoch, as a rule."""
LEAST_RISING = 32
"""Updates of a run from which the end of a warm-up can be told to be out of its reach."""


@dataclass(slots=True)
class _Used:
    """What one optimizer has used. ``num_dead``: the last updates in a row. ``seen``: the latest
    answer of its schedule, which may be gone, with its optimizer, when the run ends.
    """

    num: int = 0
    num_changes: int = 0
    latest: float = 0.0
    num_dead: int = 0
    highest: float = 0.0
    micros: int = 1
    told: bool = field(default=False)
    seen: RateFacts | None = None
    schedule: Callable[[], LRScheduler | None] = lambda: None

    @property
    def is_look(self) -> bool:
        """Whether a schedule that was not asked yet is to be asked now where its warm-up ends:
        after ``FIRST_LOOK`` updates, and each time that their number has doubled.
        """
        return self.num >= FIRST_LOOK and not self.num & (self.num - 1) and not self.schedule()

    @property
    def is_rare(self) -> bool:
        """Whether most updates had the rate of the one before."""
        return self.num >= FIRST_LOOK and RARELY * self.num_changes <= self.num


class Rates:
    """Follows the rates of the optimizers of one run."""

    def __init__(self) -> None:
        self._used: WeakKeyDictionary[Optimizer, _Used] = WeakKeyDictionary()
        self._odd: list[_Used] = []
        """Those whose schedules were asked."""

    def note(self, step: Step, optimizer: Optimizer) -> RateFacts | None:
        """Note an update of ``optimizer`` that is near; return what became of the rates, once,
        where most are 0 or no recipe has such a warm-up.

        No device work: rates that lie on a device are not read.
        """
        rates = rates_in(optimizer.param_groups)
        if not rates:
            return None
        used = self._used.setdefault(optimizer, _Used())
        rate = max(rates)
        used.num_changes += used.num > 0 and rate != used.latest
        used.num, used.latest = used.num + 1, rate
        used.micros = max(used.micros, len(step.losses))
        if math.isfinite(rate):  # beside an infinite one every other is as good as 0
            used.highest = max(used.highest, rate)
        is_dead = 0.0 <= rate <= DEAD * used.highest and math.isfinite(rate)
        used.num_dead = used.num_dead + 1 if is_dead else 0
        if used.told:
            return None
        if rate < 0.0 < used.highest and math.isfinite(rate):
            used.told = True
            return RateFacts(
                num_used=used.num, num_dead=0, highest=used.highest, coming=rate, lowest=rate
            )
        least = max(LEAST_DEAD, math.ceil(DEAD_SHARE * (used.num - used.num_dead)))
        if used.num_dead == least:
            found = self._asked(optimizer, used) or _given(optimizer, used)
            used.told = found is not None and found.coming <= DEAD * max(used.highest, 1e-30)
        elif not used.num & (used.num - 1) and used.is_look:
            found = self._asked(optimizer, used) if _is_open(optimizer, used) else None
            found = found or _set_by_hand(used)
            used.told = found is not None and found.rising >= LONGEST_WARM_UP
        else:
            return None
        return replace(found, length=0) if found is not None and used.told else None

    def finished(self) -> Iterator[RateFacts]:
        """Yield what is known at the end of a run of rates that stayed at 0, or never came to
        their peak.
        """
        alive = {id(used): optimizer for optimizer, used in self._used.items()}
        for used in {id(one): one for one in (*self._odd, *self._used.values())}.values():
            optimizer = alive.get(id(used))
            never = used.num == used.num_dead >= LEAST_DEAD
            if used.told or not (never or used.num >= LEAST_RISING):
                continue
            if optimizer is not None and not (never or _is_open(optimizer, used)):
                continue
            now = self._asked(optimizer, used) if optimizer is not None else None
            found = now or _later(used)  # a schedule may be gone, alone or with its optimizer
            if found is not None and not _is_stepped_rarely(used, found):
                found = replace(found, length=0)
            if found is not None and (never or found.length or found.coming > 2 * found.highest):
                yield found

    def _asked(self, optimizer: Optimizer, used: _Used) -> RateFacts | None:
        schedules = schedules_of(optimizer)
        if len(schedules) != 1:  # by hand, or several that multiply: nobody to be asked
            return None
        (schedule,) = schedules
        coming = followed(schedule, _is_over)
        if not coming:
            return None
        used.schedule = ref(schedule)
        if not any(used is one for one in self._odd):
            self._odd.append(used)
        used.seen = RateFacts(
            num_used=used.num,
            num_dead=used.num_dead,
            highest=used.highest,
            coming=max(coming),
            num_schedule_steps=schedule.last_epoch,
            num_micro=used.micros,
            rising=len(coming) if _is_rising(coming) else 0,
            length=_length(schedule.last_epoch, coming),
            lowest=min(0.0, *coming),
        )
        return used.seen


def _given(optimizer: Optimizer, used: _Used) -> RateFacts | None:
    """Return that no update so far had another rate than 0, which is the one that the optimizer was
    made with; None where something may set another.
    """
    if used.highest > 0.0 or schedules_of(optimizer) or not is_as_made(optimizer):
        return None
    return RateFacts(
        num_used=used.num, num_dead=used.num_dead, highest=0.0, coming=0.0, is_given=True
    )


def _set_by_hand(used: _Used) -> RateFacts | None:
    """Return what a script that sets a new rate ahead of each update is going to set, None where
    its source does not say.
    """
    is_new = used.num == FIRST_LOOK == used.num_changes + 1 and not used.num_dead
    frame = user_frame() if is_new else None
    if frame is None or is_library(frame.f_code.co_filename):
        return None
    found = rates_to_come(frame, used.latest, _FURTHER)
    if found is None:
        return None
    half, whole, far, farther = found.rates
    # One that rises without end is no warm-up: its run is to end before that matters.
    if not 2.0 * used.highest < half < whole or farther > far:
        return None
    return RateFacts(
        num_used=used.num,
        num_dead=0,
        highest=used.highest,
        coming=whole,
        rising=LONGEST_WARM_UP,
        set_at=found.at,
    )


def _later(used: _Used) -> RateFacts | None:
    """Return what was known of a schedule, as of the last update of its optimizer."""
    if used.seen is None:
        return None
    return replace(
        used.seen,
        num_used=used.num,
        num_dead=used.num_dead,
        highest=used.highest,
        num_schedule_steps=max(1, used.seen.num_schedule_steps, used.num_changes),
    )


def _is_stepped_rarely(used: _Used, found: RateFacts) -> bool:
    """Return whether a schedule is as long as its run has updates, and was stepped far more rarely:
    one that is meant to be stepped for each epoch is as long as there are epochs.
    """
    seen = used.seen
    rarely = seen is not None and RARELY * seen.num_schedule_steps <= seen.num_used
    return rarely and used.is_rare and abs(found.length - found.num_used) <= 1


def _length(begun: int, coming: Sequence[float]) -> int:
    """Return the length of a schedule that was stepped ``begun`` times and gives these rates; 0
    where it was not seen to come to an end.
    """
    if len(coming) % AHEAD:  # it refuses a step beyond its end
        return begun + len(coming) - 1
    lowest = coming.index(min(coming))
    return begun + lowest if lowest < len(coming) - 1 else 0


def _is_rising(coming: Sequence[float]) -> bool:
    earlier, later = coming[:-AHEAD], coming[-AHEAD:]
    return bool(earlier) and max(earlier) < max(later)


def _is_over(rates: Sequence[float]) -> bool:
    """Return whether a schedule has come to its peak, or was asked for long enough."""
    if len(rates) % AHEAD or len(rates) < 2 * AHEAD:
        return False
    return len(rates) >= LONGEST_WARM_UP or max(rates[-AHEAD:]) <= max(rates[:-AHEAD])


def _may_rise(optimizer: Optimizer, used: _Used) -> bool:
    """Return whether some schedule multiplies a rate far above those that were used."""
    return max(_multiplied(optimizer), default=0.0) > 2 * used.highest


def _is_open(optimizer: Optimizer, used: _Used) -> bool:
    """Return whether a schedule is to be asked: it may rise, or is stepped rarely."""
    return _may_rise(optimizer, used) or (used.is_rare and bool(_multiplied(optimizer)))


def _multiplied(optimizer: Optimizer) -> list[float]:
    return [float(g["initial_lr"]) for g in optimizer.param_groups if "initial_lr" in g]
