"""Code of a script that is run for what it returns, and writes to nothing that was there before."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.own_code import is_class_of_library, is_of_library
from nanstop.replay.conditions import unspoken
from nanstop.replay.script_objects import reaches_iterator, script_objects_kept
from nanstop.replay.undo import attributes_kept
from nanstop.tracing.operators import outputs_of, tensors, traits


@contextmanager
def leaving_no_trace(
    kind: type[Optimizer], *, parameters: Iterable[Tensor] = (), own: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Have steps of an optimizer of this class write, where a script has spelled any of it, to
    ``own`` alone and to tensors that are made inside. What the script's code remembers, and the
    gradients of ``parameters``, are on exit what they were; what it says is dropped.

    Raises ``WritesElsewhereError`` where it comes to an iterator that has no copy, and inside of a
    step that would write to another tensor; that is not written to.
    """
    called: Any = (kind, kind.step)
    if is_class_of_library(kind) and is_of_library(inspect.unwrap(kind.step)):
        yield
        return
    if reaches_iterator((), called):
        raise WritesElsewhereError("its step reads an iterator")
    with (
        unspoken(),
        script_objects_kept((), called),
        attributes_kept((one, "grad") for one in parameters),
        _OwnMemory(own),
    ):
        yield


class WritesElsewhereError(RuntimeError):
    """Raised inside of what is tried, in the place of a write to what is not its own."""


class _OwnMemory(TorchDispatchMode):
    """Refuses ops that write to storages which none of the ops inside has made, nor ``own``."""

    def __init__(self, own: Iterable[Tensor]) -> None:
        super().__init__()
        self._made: set[StorageWeakRef] = set(map(_storage, own))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [(place, _storage(one)) for place, _, one in tensors(args, kwargs)]
        mutated = traits(func).mutated
        if any(place in mutated and one not in self._made for place, one in given):
            raise WritesElsewhereError(str(func))
        result = func(*args, **kwargs)
        made = {_storage(one) for one in outputs_of(func, args, kwargs, result)}
        is_literal = func is torch.ops.aten.lift_fresh.default  # of `torch.tensor`: it made that
        self._made |= made if is_literal else made.difference(one for _, one in given)
        return result


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
