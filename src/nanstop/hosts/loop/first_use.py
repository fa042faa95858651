"""The first step of a loop that no optimizer announces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.hosts.patch_table import Table
from nanstop.numerics.graph import is_leaf
from nanstop.own_code import is_library
from nanstop.replay.function_modes import OwnMode, put_on, take_off
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

MOST_CALLS = 4096
"""Calls of torch after which a script that has used nothing to be trained is left alone."""
_ASKS = frozenset(
    {
        *("requires_grad_", "detach", "detach_", "numel", "nelement", "size", "dim", "stride"),
        *("data_ptr", "element_size", "is_floating_point", "is_complex", "register_hook"),
        *("type", "to", "cpu", "cuda", "untyped_storage", "storage", "share_memory_"),
        *("tolist", "numpy", "get_device", "is_contiguous", "format"),
    }
)
"""What is asked of a tensor before anything is computed with it."""


class FirstUse(OwnMode):
    """On the stack until a script computes with a tensor that is to be trained, or calls a module.

    ``loops`` gives what watches raw loops, or None: its tape sees the call that was the first, and
    all that come after it. Modules are called without this mode: they go other ways under one.
    """

    def __init__(self, table: Table, loops: Callable[[], Any]) -> None:
        super().__init__()
        self._table, self._loops = table, loops
        self._left = MOST_CALLS
        self._awaits_call = True
        table.replace(nn.Module, "__call__", self._call)
        put_on(self)
        self.is_on = True
        """Until it has come off the stack: inside a call that it handles it cannot."""

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._left -= 1
        if self._left < 0 or not _trains(func, args):
            return func(*args, **kwargs)
        from nanstop.tracing.places import user_frame  # a script that trains nothing needs none

        frame = user_frame()
        if frame is None or is_library(frame.f_code.co_filename):
            return func(*args, **kwargs)
        self.end()
        loops = self._loops()
        tape = loops.state.expect_first() if loops is not None else None
        if tape is None or not tape.stop():
            return func(*args, **kwargs)
        try:
            return tape.handle(func, args, kwargs)
        finally:
            tape.start()

    def _call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``nn.Module.__call__``: what trains may begin with its first call."""
        self.end()
        trains = torch.is_grad_enabled() and module.training
        if trains and any(p.requires_grad for p in module.parameters()):
            self._loops()
        # Not as the script calls it: what is around this, a class's own `__call__` or what a script
        # has put in the place of this one, has come this far by now.
        by_now = self._table.stand_in(nn.Module, "__call__")
        if by_now is None:
            return original(module, *args, **kwargs)
        return by_now(original, module, *args, **kwargs)

    def end(self) -> None:
        """See no more, and come off the stack, if that is possible now."""
        self._left = 0
        self.is_on &= not take_off(self)
        if self._awaits_call:
            self._awaits_call = False
            self._table.restore(nn.Module, "__call__")


def _trains(func: Any, args: Any) -> bool:
    """Return whether a call computes with a leaf that asks for gradients."""
    name = getattr(func, "__name__", "__")
    if name.startswith("__") and name.endswith("et__"):  # an attribute
        return False
    return (
        name not in _ASKS
        and torch.is_grad_enabled()
        and any(isinstance(one, Tensor) and one.requires_grad and is_leaf(one) for one in args)
    )
