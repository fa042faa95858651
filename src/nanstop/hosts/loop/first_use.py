"""The first step of a loop that no optimizer announces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanstop.own_code import is_library
from nanstop.replay.function_modes import OwnMode, put_on, take_off
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import user_frame

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
    """On the stack until a script computes with a tensor that is to be trained.

    ``begin`` is called then, and returns the mode that is to see that call, and all that come after
    it, or None. It sees no call of a module: whoever stands in for those ends it before.
    """

    def __init__(self, begin: Callable[[], Any]) -> None:
        super().__init__()
        self._begin = begin
        self._left = MOST_CALLS
        self.awaits_call = True
        """Whether somebody stands in for the calls of modules until it ends."""
        put_on(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._left -= 1
        if self._left < 0 or not _trains(func, args):
            return func(*args, **kwargs)
        frame = user_frame()
        if frame is None or is_library(frame.f_code.co_filename):
            return func(*args, **kwargs)
        self._left = 0
        tape = self._begin()
        if tape is None or not tape.stop():
            return func(*args, **kwargs)
        try:
            return tape.__torch_function__(func, types, args, kwargs)
        finally:
            tape.start()

    def end(self) -> None:
        """See no more, and come off the stack, if that is possible now."""
        self._left = 0
        take_off(self)


def _trains(func: Any, args: Any) -> bool:
    """Return whether a call computes with a leaf that asks for gradients."""
    name = getattr(func, "__name__", "__")
    if name.startswith("__") and name.endswith("et__"):  # an attribute
        return False
    return (
        name not in _ASKS
        and torch.is_grad_enabled()
        and any(isinstance(one, Tensor) and one.requires_grad and one.is_leaf for one in args)
    )
