"""Notes which lines of a script make the schedules of its rates, and which step them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

from nanstop.hosts.patch_table import Table
from nanstop.numerics.optimizer_state import innermost
from nanstop.own_code import is_library
from nanstop.records import SourceLine
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import Line, source_line, user_line

__tracebackhide__ = passes_through


class ScheduleLines:
    """Stands in for the constructors of schedules and for the steps of those that were made."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._made: WeakKeyDictionary[Optimizer, Line] = WeakKeyDictionary()
        self._stepped: WeakKeyDictionary[Optimizer, Line] = WeakKeyDictionary()
        self._known: WeakSet[LRScheduler] = WeakSet()

    def install(self) -> None:
        for kind in (LRScheduler, SequentialLR, ChainedScheduler):
            self._table.replace(kind, "__init__", self._make)

    def of(self, optimizer: Any) -> dict[str, SourceLine | None]:
        """Return the script's lines that made the latest schedule of an optimizer and stepped it
        last, as fields of ``RunFacts``; None where that was not seen.
        """
        own = innermost(optimizer)
        if not isinstance(own, Optimizer):
            return {}
        return {
            "schedule_at": _of_script(self._made.get(own)),
            "stepped_at": _of_script(self._stepped.get(own)),
        }

    def _make(self, original: Any, schedule: Any, *args: Any, **kwargs: Any) -> None:
        original(schedule, *args, **kwargs)
        optimizer = innermost(getattr(schedule, "optimizer", None))
        if isinstance(optimizer, Optimizer):
            self._made[optimizer] = user_line()
            self._known.add(schedule)
            owner = next(kind for kind in type(schedule).__mro__ if "step" in vars(kind))
            self._table.replace(owner, "step", self._step)

    def _step(self, original: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        if schedule in self._known:  # its constructor makes a first step by itself
            self._stepped[innermost(schedule.optimizer)] = user_line()
        return original(schedule, *args, **kwargs)


def _of_script(line: Line) -> SourceLine | None:
    return None if line is None or is_library(line[0].co_filename) else source_line(line)
