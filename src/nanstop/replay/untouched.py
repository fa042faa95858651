"""Nothing that a script may hold a graph of moves: versions and values of its tensors, put back.

Autograd refuses a backward through a tensor whose version is not the one that it was saved with,
whatever its values are. What nanstop runs again writes tensors of the script in place; afterwards
their versions are what they were. What is copied and put back is no call of the script: no function
mode, a remedy's included, has a part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nanstop.frozen import frozen
from nanstop.numerics.tensors import by_torch_alone


class Versions:
    """The versions that tensors have now. No device work."""

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        # One at a time: the form that every torch since 2.6 takes.
        unique = {id(tensor): tensor for tensor in tensors if tensor is not None}
        known = (tensor for tensor in unique.values() if not tensor.is_inference())
        self._kept = [_unsafe_preserve_version_counter(tensor) for tensor in known]

    def put_back(self) -> None:
        """Have the tensors at these versions again, whatever wrote them meanwhile."""
        for one in self._kept:
            one.__exit__(None, None, None)


@contextmanager
def versions_kept(tensors: Iterable[Tensor | None]) -> Iterator[None]:
    """Have every tensor at the same version on exit as on entry, whatever wrote it meanwhile.
    No device work.

    Whoever puts values back, or writes what the script's own run would have left, does it inside.
    """
    versions = Versions(tensors)
    try:
        yield
    finally:
        versions.put_back()


@frozen
class TensorMemory:
    """A tensor, the memory that it is in, and a copy of all that lies there:
    other tensors may be views of it.
    """

    tensor: Tensor
    place: Tensor
    memory: Tensor
    copy: Tensor

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMemory:
        """Return a tensor as it is now; the copy is on its device."""
        with by_torch_alone():
            memory = _memory(tensor)
            return cls(tensor, tensor.data, memory, memory.clone())

    def put_back(self) -> None:
        """Have the tensor in its memory again, and there what was in it;
        its version does not move.
        """
        with torch.no_grad(), by_torch_alone():
            if address(self.tensor) != address(self.place):
                self.tensor.data = self.place
            self.memory.copy_(self.copy)


def address(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from any other's while it is in use;
    0 where it has none of its own.
    """
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return 0
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # without values
        return 0


def _memory(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's storage;
    the tensor itself where it has none (sparse, sharded).
    """
    # It has a version of its own: what is written through it does not move the tensor's.
    data = tensor.data
    if not address(data):
        return data
    return torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage())


def write(tensor: Tensor, values: Tensor) -> None:
    """Put the values that ``copy_of`` returned back into a tensor, in place."""
    with torch.no_grad(), by_torch_alone():
        _once(tensor.detach()).copy_(values)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor; of an expanded one each element once, for no other can be
    written.
    """
    with by_torch_alone():
        return _once(tensor.detach()).clone()


def holds(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether a tensor holds the very bits of what ``copy_of`` has returned.
    Synchronises the device.
    """
    present = _once(tensor.detach())
    if (present.dtype, present.shape, present.device) != (copy.dtype, copy.shape, copy.device):
        return False
    if present.dtype in _INTEGERS:
        kind = _INTEGERS[present.dtype]
        present, copy = present.view(kind), copy.view(kind)  # a NaN equals itself
    return torch.equal(present, copy)


_INTEGERS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def _once(tensor: Tensor) -> Tensor:
    if tensor.layout is torch.strided:
        for place, stride in enumerate(tensor.stride()):
            if stride == 0 and tensor.shape[place] > 1:
                tensor = tensor.narrow(place, 0, 1)
    return tensor
