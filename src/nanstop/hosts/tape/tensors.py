"""Small questions to tensors that a loop hands around."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor


def total(losses: Iterable[Tensor]) -> Tensor:
    """Return the detached sum of what ``backward`` was called on in one micro-batch."""
    scalars = [loss.detach().sum() if loss.dim() else loss.detach() for loss in losses]
    return sum(scalars[1:], start=scalars[0]) if scalars else torch.zeros(())


Autocast = tuple[str, bool, torch.dtype]
"""Device type, whether autocast is on there, and its format."""


def autocast_state(device: str) -> Autocast:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def in_autocast(state: Autocast) -> AbstractContextManager[Any]:
    """Return a context in which autocast is as it was."""
    device, enabled, dtype = state
    if autocast_state(device) == state:
        return nullcontext()
    return torch.autocast(device, dtype=dtype, enabled=enabled)


SavedHooks = tuple[Callable[..., Any], Callable[..., Any]]
"""What packs a tensor that autograd saves, and what unpacks it for the backward."""


def _reader() -> Callable[[], SavedHooks | None]:
    """Return what reads the innermost hooks: torch has no public name for it, and older versions
    no argument.
    """
    read: Any = getattr(
        getattr(torch._C, "_autograd", None), "_top_saved_tensors_default_hooks", None
    )
    for each in (partial(read, True), read) if read is not None else ():
        try:
            each()
        except TypeError:
            continue
        return each
    return lambda: None


_top_hooks = _reader()


def saved_hooks() -> SavedHooks | None:
    """Return the hooks that a script has on what is saved now, None without any."""
    return _top_hooks()


def in_hooks(hooks: SavedHooks | None) -> AbstractContextManager[Any]:
    """Return a context in which a script's hooks see what is saved."""
    return nullcontext() if hooks is None else torch.autograd.graph.saved_tensors_hooks(*hooks)
