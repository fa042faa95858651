"""Updates that a loop asks accelerate for, and that accelerate never makes, or makes of each
micro-batch although it was told to sum up several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from nanstop.hosts.patch_table import Table
from nanstop.numerics.optimizer_state import innermost
from nanstop.records import AccumulationFacts, GradientAccount, StepId
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import Line, source_line, user_line

__tracebackhide__ = passes_through

_ENGINES = ("DEEPSPEED", "MEGATRON_LM")
"""They divide losses themselves."""
_TWO, _LEAST = 2, 8
"""Micro-batches from which there is something to sum up; updates from which that is told."""


@dataclass(slots=True)
class _Asked:
    """What one optimizer was asked for. ``is_made``: whether it has made any update."""

    name: str
    num: int = 0
    is_made: bool = False
    line: Line = None
    num_single: int = 0


class AskedUpdates:
    """Stands in for ``step`` of accelerate's optimizers, which makes no update while gradients are
    summed up.

    ``num_made``: returns how many updates an optimizer has made. ``is_loops``: whether a call now
    is the loop's own. ``num_micros``: how many micro-batches its open window has. ``learned``: told
    what is known then of the facts of the run, by name.
    """

    def __init__(
        self,
        num_made: Callable[[Any], int],
        is_loops: Callable[[], bool],
        num_micros: Callable[[], int],
        learned: Callable[..., None],
    ) -> None:
        self._num_made = num_made
        self._is_loops = is_loops
        self._num_micros, self._learned = num_micros, learned
        self._sums_up = False
        """Whether the loop has told accelerate where a micro-batch begins, or when to exchange."""
        self._divided: tuple[int, Line] = 0, None
        """By what accelerate has divided the last loss, and the line of that backward."""
        self._of: WeakKeyDictionary[Any, _Asked] = WeakKeyDictionary()
        self._all: list[_Asked] = []
        """Also those of optimizers that are gone by the end."""

    def install(self, table: Table) -> None:
        """Stand in where accelerate has been imported by now."""
        optimizer = getattr(sys.modules.get("accelerate.optimizer"), "AcceleratedOptimizer", None)
        if optimizer is not None:
            table.replace(optimizer, "step", self._step)
        accelerator = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
        if accelerator is not None:
            table.replace(accelerator, "backward", self._backward)
            for name in ("accumulate", "no_sync"):
                table.replace(accelerator, name, self._enter)

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

    def _enter(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._sums_up |= self._is_loops()
        return original(*args, **kwargs)

    def _backward(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        is_divided = self._is_loops() and accelerator.distributed_type not in _ENGINES
        num = accelerator.gradient_accumulation_steps if is_divided else 0
        self._divided = num, user_line()
        return original(accelerator, *args, **kwargs)

    def _count_single(self, asked: _Asked) -> None:
        """Note an update that is near, and tell where each so far was of one micro-batch of those
        that were to be summed up.
        """
        (num, line), self._divided = self._divided, (0, None)
        self._sums_up |= num < _TWO or self._num_micros() != 1
        asked.num_single += 1
        if not self._sums_up and asked.num_single == max(_LEAST, 2 * num):
            facts = AccumulationFacts(
                num_single=asked.num_single, num_asked=num, backward_at=source_line(line)
            )
            self._learned(accumulation=facts)

    def _step(self, original: Any, wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_loops():
            return original(wrapper, *args, **kwargs)
        asked = self._of.get(wrapper)
        if asked is None:
            asked = self._of[wrapper] = _Asked(type(innermost(wrapper)).__name__)
            self._all.append(asked)
        if not self._sums_up:
            self._count_single(asked)
        result = original(wrapper, *args, **kwargs)
        asked.num, asked.line = asked.num + 1, user_line()
        # Of an optimizer in another the outer one may be the one whose updates are counted.
        held = (innermost(wrapper), wrapper.optimizer)
        asked.is_made |= any(self._num_made(one) > 0 for one in held)
        return result
