"""Code of a script that is run for what it returns, and writes to nothing that was there before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nanstop.replay.undo import attributes_kept, exchanged
from nanstop.tracing.operators import outputs_of, tensors, traits


@contextmanager
def leaving_no_trace(function: Any, parameters: list[Tensor]) -> Iterator[None]:
    """Have a function of Python write to tensors alone that are made inside. Names of its module
    that it gives another value, and the gradients of ``parameters``, are on exit what they were.
    Raises ``WritesElsewhereError`` where it would write to another tensor; that is not written to.
    """
    table, grads = function.__globals__, [(one, "grad") for one in parameters]
    with exchanged(table, dict(table)), attributes_kept(grads), _OwnMemory():
        yield


class WritesElsewhereError(RuntimeError):
    """Raised inside of what is tried, in the place of a write to memory that is not its own."""


class _OwnMemory(TorchDispatchMode):
    """Refuses ops that write to storages which none of the ops inside has made."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[StorageWeakRef] = set()

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
        self._made |= made.difference(one for _, one in given)
        return result


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
