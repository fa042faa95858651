"""Hooks that a script has given an optimizer: they may write to the gradients that it is about to
take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

_LAST = -1
"""The key of what looks: torch numbers the others from 0."""


class OwnHooks:
    """``look``: called with an optimizer once more behind its own hooks, which torch calls after
    those of every optimizer.
    """

    def __init__(self, look: Callable[[Optimizer], None]) -> None:
        self._look = look
        self._waits_for: Optimizer | None = None

    def begin(self, optimizer: Optimizer) -> None:
        """Have the look come behind the hooks of an update that has begun."""
        hooks = optimizer._optimizer_step_pre_hooks
        self._waits_for = optimizer
        hooks.pop(_LAST, None)  # one that a step has left behind which raised
        hooks[_LAST] = self._look_last

    def end(self, optimizer: Optimizer) -> None:
        """Take back what was put behind an optimizer's hooks."""
        optimizer._optimizer_step_pre_hooks.pop(_LAST, None)

    def _look_last(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._waits_for is optimizer:  # a step of a class above has the same hooks
            self._waits_for = None
            self._look(optimizer)
