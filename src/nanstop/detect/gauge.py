"""When a healthy run is looked at more closely, and what the looks add up to.

Two kinds of look, which together have ``SHARE`` of the run's time after those of the first steps. A
wide one runs a micro-batch again under the recorder and finds what was absorbed. A narrow one
measures the modules in a forward of the run itself, at a small part of the cost: enough of them
follow a range over time, and tell that it will leave its format. A part of the time is put aside
for a range that grows: then looks at that one alone, which cost less, come as often as its growth
asks for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import TYPE_CHECKING

from nanstop.detect.growth import Growth, foretell, suspected
from nanstop.records import FORMAT_MAX, RangeRow, RunFacts
from nanstop.records.formats import HALF
from nanstop.replay.conditions import is_compiling
from nanstop.tracing.module_ranges import ModuleEnd, ModuleRanges

if TYPE_CHECKING:
    from nanstop.records import Localization
    from nanstop.replay.step import ModelView, Step

SHARE = 0.005
WIDE_SHARE = EVEN_SHARE = 0.002
"""Of which wide looks, and narrow ones at all modules, may take this much each."""
NUM_FIRST = 2
"""Narrow looks that come at the start and are not counted: the first of all is slow."""
KEPT = 48
"""Narrow looks that a range is remembered for."""
LOOKS_AHEAD = 12
"""How many looks are wanted before a growing range arrives."""
LEAST_STEPS = 4
MUCH_ROOM = 64.0
"""Doublings from which there is nothing to say: float32 and bfloat16 have 128 from 1 on."""


class Gauge:
    """The looks of one run. ``clock``: seconds."""

    def __init__(self, view: ModelView, clock: Callable[[], float] = time.monotonic) -> None:
        self._view = view
        self._clock = clock
        self._began = clock()
        self._next_wide = -math.inf
        self._wide_spent: float | None = None
        self._tap: ModuleRanges | None = None
        self._ranges: dict[ModuleEnd, deque[tuple[int, float]]] = {}
        self._last = self._last_even = -1
        self._num_looks = 0
        self._spent = 0.0
        self._costs: dict[bool, deque[float]] = {True: deque(maxlen=9), False: deque(maxlen=9)}
        """Seconds of the last looks at some modules alone (True), and at all of them."""
        self._growing: dict[str, float] = {}
        """Modules of ranges that may be growing, and in how many steps each would leave its
        format.
        """
        self._foretold = False
        self.formats: frozenset[str] = frozenset()
        """The formats in which modules were seen to work, whatever the weights and the loop's
        autocast say.
        """
        self._of_formats: tuple[RunFacts, bool] | None = None
        """Whether wide looks are worth their time, by the facts that said so last."""
        self._earliest = -math.inf
        """No narrow look is due before."""
        self._closed = False
        self.room: float | None = None
        """Doublings that the narrowest module had left in the look that was just read, None where
        none was, or there is much room in all.
        """
        self.rooms: dict[ModuleEnd, float] = {}
        """The same of the output of each module that has not much of it, in the forward's order."""

    def wide_due(self, facts: RunFacts) -> bool:
        """Return whether a micro-batch of a healthy window should run under the recorder now.

        Only half formats absorb overflow at values that training meets, so others are not looked
        at.
        """
        if self._of_formats is None or self._of_formats[0] is not facts:
            half = facts.autocast in HALF or any(g.dtype in HALF for g in facts.param_groups)
            half |= not self.formats.isdisjoint(HALF)
            self._of_formats = facts, half and facts.world_size == 1
        return self._of_formats[1] and self._clock() >= self._next_wide

    def wide(self, step: Step) -> Localization | None:
        """Return where a micro-batch made an infinity that turned finite again, None if nowhere.

        Runs it under the recorder, which synchronises the device; undone bitwise; raises what the
        step raises.
        """
        from nanstop.localize.localize import localize

        began = self._clock()
        try:
            return localize(step, 0)
        finally:
            now = self._clock()
            self._next_wide = now + (now - began) / WIDE_SHARE
            first = self._wide_spent is None
            self._wide_spent = 0.0 if first else (self._wide_spent or 0.0) + now - began

    def stepped(self, step: int) -> RangeRow | None:
        """Note that an update was applied;
        return, once, the range that will be the first to leave its format.

        Reads the look that was taken in this step, if one was, which synchronises the device, and
        prepares one for the next step where it is time for it.
        """
        began, tap, self.room, self.rooms = self._clock(), self._tap, None, {}
        if tap is None and began < self._earliest:
            return None
        self._tap = None
        row = self._read(step, tap) if tap is not None else None
        self._tap = self._prepared(step)
        if self._tap is not None:
            self._tap.attach()
        if tap is not None:
            costs = self._costs[tap.partial]
            costs.append(self._clock() - began + tap.seconds)
            if self._num_looks > NUM_FIRST:
                # A busy machine's pause within one look is no cost of it.
                self._spent += median(costs)
            self._earliest = self._next_even()
        return row

    def close(self) -> None:
        """Follow no more ranges."""
        self._closed = True
        self.drop()

    def drop(self) -> None:
        """Take away the hooks of the look that was prepared: what runs next is no ordinary step."""
        if self._tap is not None:
            self._tap.detach()
            self._tap = None

    def _prepared(self, step: int) -> ModuleRanges | None:
        """Return the look for the next step, or None where none is due."""
        if self._closed:
            return None
        even = step - self._last_even >= LEAST_STEPS
        if self._num_looks < NUM_FIRST or (even and self._affords(EVEN_SHARE, partial=False)):
            first = not self._num_looks
            return self._tapped(inside=first)
        if not self._growing:
            return None
        spacing = max(LEAST_STEPS, min(self._growing.values()) / LOOKS_AHEAD)
        if step - self._last < spacing or not self._affords(SHARE, partial=True):
            return None
        return self._tapped(self._growing)

    def _tapped(self, only: Collection[str] = (), *, inside: bool = False) -> ModuleRanges | None:
        """Return a look at modules; None under a compiler, which follows no hooks."""
        if is_compiling():
            return None
        return ModuleRanges(self._view.root, only, inside=inside, clock=self._clock)

    def _affords(self, share: float, *, partial: bool) -> bool:
        known = self._costs[partial] or self._costs[False]
        spent = self._spent + (0.0 if share < SHARE else self._wide_spent or 0.0)
        return spent + median(known) <= share * (self._clock() - self._began)

    def _next_even(self) -> float:
        """Return when the next look at all modules can be afforded; at once where some are followed
        that look at fewer.
        """
        if self._num_looks < NUM_FIRST or self._growing:
            return -math.inf
        cost = self._spent + median(self._costs[False])
        return self._began + cost / EVEN_SHARE

    def _read(self, step: int, tap: ModuleRanges) -> RangeRow | None:
        tap.detach()
        if step <= self._last:  # another training of the same model, or one that was rolled back
            self._ranges.clear()
        self._last, self._num_looks = step, self._num_looks + 1
        if not tap.partial:
            self._last_even = step
            self.formats |= tap.formats
            self._of_formats = None
        growths: list[tuple[ModuleEnd, Growth]] = []
        self._growing = {}
        sizes = tap.read()
        if not tap.partial:
            rooms = {
                spot: math.log2(FORMAT_MAX[spot.dtype] / size)
                for spot, size in sizes.items()
                if 0.0 < size < math.inf and spot.dtype in FORMAT_MAX
            }
            narrow = {spot: room for spot, room in rooms.items() if room < MUCH_ROOM}
            self.room = min(narrow.values(), default=None)
            self.rooms = {spot: room for spot, room in narrow.items() if spot.end == "output"}
        for spot, size in sizes.items():
            if not 0.0 < size < math.inf or spot.dtype not in FORMAT_MAX or self._foretold:
                continue
            kept = self._ranges.setdefault(spot, deque(maxlen=KEPT))
            kept.append((step, math.log2(size / FORMAT_MAX[spot.dtype])))
            steps, bits = zip(*kept, strict=True)
            arrival = suspected(steps, bits)
            if arrival is None:
                continue
            self._growing[spot.module] = min(arrival, self._growing.get(spot.module, arrival))
            growth = foretell(steps, bits)
            if growth is not None:
                growths.append((spot, growth))
        if not growths:
            return None
        self._foretold, self._growing = True, {}
        return self._row(step, *_origin(growths))

    def _row(self, step: int, spot: ModuleEnd, growth: Growth) -> RangeRow:
        bits = self._ranges[spot][-1][1]
        return RangeRow(
            module=spot.module,
            op=spot.end,
            dtype=spot.dtype,
            absmax=FORMAT_MAX[spot.dtype] * 2.0**bits,
            headroom_bits=-bits,
            growth=growth.rate,
            at=step,
            reaches=growth.reaches,
        )


def _origin(growths: Sequence[tuple[ModuleEnd, Growth]]) -> tuple[ModuleEnd, Growth]:
    """Return, of ranges in the order of the forward, the first that may be the first to leave its
    format.

    What grows in one module grows in all that is added to it.
    """
    soonest = min(growth.reaches[1] for _, growth in growths)
    return next(one for one in growths if one[1].reaches[0] <= soonest)
