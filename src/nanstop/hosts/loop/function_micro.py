"""A micro-batch of the manual interface: a function of the user's and the batch it was given."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from nanstop.numerics.graph import is_leaf
from nanstop.numerics.tensors import tensors, version
from nanstop.own_code import is_of_library
from nanstop.replay.rng import RngState
from nanstop.replay.step import Batch
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import Line

__tracebackhide__ = passes_through


class FunctionMicro:
    """See ``hosts.loop.step.Micro``: a call of the user's loss function, and of ``backward`` on
    what it returns. ``rng``: before it.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any], Tensor],
        batch: Any,
        *,
        backward: Callable[[Any], Tensor],
        rng: RngState,
        reduced: bool,
    ) -> None:
        self.loss: Tensor | None = None
        self.loss_fn = loss_fn
        self.batch = named_batch(batch)
        self.rng = rng
        self.reduced = reduced
        self._backward = backward
        self._given = batch
        self._versions = [(t, version(t)) for t in tensors(self.batch)]

    @property
    def calls_script(self) -> bool:
        return not is_of_library(self.loss_fn)

    def obstacle(self) -> str:
        moved = any(version(t) != v for t, v in self._versions)
        return "the batch was changed in place by the loss function" if moved else ""

    def rerun(self, batch: Batch | None) -> Tensor:
        given = copy.copy(self._given) if batch is None else _like(self._given, batch)
        return self._backward(self.loss_fn(given))

    def cuts(self) -> list[Line]:
        return []

    def leaves(self) -> list[Tensor]:
        return [t for t in tensors(self.batch) if t.requires_grad and is_leaf(t)]


def named_batch(batch: Any) -> Batch:
    """Return a batch by name: a mapping as it is, positions as ``arg0``, ``arg1``, ..."""
    if isinstance(batch, Mapping):
        return dict(batch)
    values = batch if isinstance(batch, (tuple, list)) else (batch,)
    return {f"arg{i}": value for i, value in enumerate(values)}


def _like(given: Any, batch: Batch) -> Any:
    if isinstance(given, Mapping):
        replaced: Any = copy.copy(given)
        for name, value in batch.items():
            replaced[name] = value
        return replaced
    if isinstance(given, (tuple, list)):
        values = batch.values()
        return type(given)(*values) if hasattr(given, "_fields") else type(given)(values)
    return batch["arg0"]
