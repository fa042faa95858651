"""Updates that a loop asks accelerate for, and that accelerate never makes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from nanstop.hosts.patch_table import Table
from nanstop.measure.followed import Line
from nanstop.numerics.optimizer_state import innermost
from nanstop.records import GradientAccount, StepId
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import source_line, user_line

__tracebackhide__ = passes_through


@dataclass(slots=True)
class _Asked:
    """What one optimizer was asked for. ``is_made``: whether it has made any update."""

    name: str
    num: int = 0
    is_made: bool = False
    line: Line = None


class AskedUpdates:
    """Stands in for ``step`` of accelerate's optimizers, which makes no update while gradients are
    summed up.

    ``num_made``: returns how many updates an optimizer has made. ``is_loops``: whether a call now
    is the loop's own.
    """

    def __init__(self, num_made: Callable[[Any], int], is_loops: Callable[[], bool]) -> None:
        self._num_made = num_made
        self._is_loops = is_loops
        self._of: WeakKeyDictionary[Any, _Asked] = WeakKeyDictionary()
        self._all: list[_Asked] = []
        """Also those of optimizers that are gone by the end."""

    def install(self, table: Table) -> None:
        """Stand in where accelerate has been imported by now."""
        known = sys.modules.get("accelerate.optimizer")
        if known is not None:
            table.replace(known.AcceleratedOptimizer, "step", self._step)

    def never_made(self, at: StepId) -> Iterator[GradientAccount]:
        """Yield an account of each optimizer that was asked for updates and has made none."""
        for asked in self._all:
            source = source_line(asked.line)
            if not asked.is_made and source is not None:
                yield GradientAccount(
                    at=at,
                    optimizer=asked.name,
                    num_elements=0,
                    num_asked=asked.num,
                    updated_at=(source,),
                )

    def _step(self, original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(wrapper, *args, **kwargs)
        if self._is_loops():
            asked = self._of.get(wrapper)
            if asked is None:
                asked = self._of[wrapper] = _Asked(type(innermost(wrapper)).__name__)
                self._all.append(asked)
            asked.num, asked.line = asked.num + 1, user_line()
            # Of an optimizer in another the outer one may be the one whose updates are counted.
            held = (innermost(wrapper), wrapper.optimizer)
            asked.is_made |= any(self._num_made(one) > 0 for one in held)
        return result
