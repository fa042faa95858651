"""Whether a step can be run again by one process of several:
one that waits for the others would wait for ever.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.errors import NanstopError
from nanstop.replay.step import Step

_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})
"""Namespaces of torch's operators that other processes take part in."""


class _Alone(TorchDispatchMode):
    """Stops at the first operation that other processes take part in, before it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.met = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            self.met = str(func)
            raise NanstopError(f"`{self.met}` needs the other processes", code="NS000")
        return func(*args, **(kwargs or {}))


def communicates(step: Step) -> str:
    """Return the first operation of a window's forwards and backwards that needs other processes,
    or "". Undone.

    Errors: ``NanstopError`` where the window cannot be run again.
    What its loss raises does not matter here.
    """
    alone = _Alone()
    with step.isolated():
        for micro in range(len(step.batches)):
            # What it raises is the operation that was stopped, or the failure itself.
            with suppress(Exception), alone:
                step.run(micro)
            if alone.met:
                break
    return alone.met
