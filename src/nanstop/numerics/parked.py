"""Tensors that only wait, out of the way of what computes: what is on a device waits in host
memory, what is in host memory in a file that nobody else sees.

A run that is investigated is nearly full. Its gradients are made anew by each replay, and exact
gradients are read once for each comparison.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nanstop.frozen import frozen
from nanstop.numerics import host_memory, room
from nanstop.numerics.tensors import by_torch_alone, has_bad, is_plain

_PIECE, _READ = 2**22, 2**18
"""Elements that are looked at, copied or written at a time; that are read from a file at a time,
beside what they are for.
"""
_TOUCHED, _FEWEST, _THREADS = 2**23, 4, 8
"""Bytes that a thread touches at a time; so many times that, several threads do; how many at most.
"""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copied_to_host(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in host memory, of its format and strides. Synchronises the device.

    New memory is touched by several threads first, however few torch may use: a copy from a device
    does so on one, page by page (1.0 GiB/s beside an H100; 6.1 once 16 threads had touched it).
    """
    tensor = tensor.detach()
    if tensor.device.type == "cpu" or not is_plain(tensor):
        return tensor.to("cpu", copy=True)
    copy = torch.empty_like(tensor, device="cpu")
    _touch(copy.untyped_storage())
    return copy.copy_(tensor)


def _touch(memory: torch.UntypedStorage) -> None:
    """Write zeros to all of some memory."""
    begin, num = memory.data_ptr(), memory.nbytes()

    def touch(place: int) -> None:
        ctypes.memset(begin + place, 0, min(_TOUCHED, num - place))  # the others run meanwhile

    places = range(0, num, _TOUCHED)
    if len(places) < _FEWEST:
        list(map(touch, places))
        return
    with ThreadPoolExecutor(min(_THREADS, len(places))) as pool:
        list(pool.map(touch, places))


class _File:
    """A file that is gone with the last who refers to it."""

    def __init__(self) -> None:
        self.stream: IO[bytes] = tempfile.TemporaryFile(prefix="nanstop-")  # noqa: SIM115

    def __del__(self) -> None:
        self.stream.close()


class Parking:
    """Where tensors wait."""

    def __init__(self) -> None:
        self._file: _File | None = None

    def put(self, tensor: Tensor) -> Parked:
        """Return the values of a tensor, parked; the tensor stays as it is. Synchronises the
        device. Raises OSError where there is no room for them.
        """
        tensor = tensor.detach()
        strides = tensor.stride() if _order(tensor) is not None else None
        flat = _flat(tensor if strides is not None else tensor.contiguous())
        form = _Form(tensor.shape, strides, tensor.dtype, tensor.device)
        bits = _all_alike(flat)
        if bits is not None:
            return Parked(form, None, None, 0, bits)
        if tensor.device.type != "cpu" and tensor.nbytes <= host_memory.free_bytes() // 2:
            return Parked(form, copied_to_host(flat), None, 0)
        if self._file is None:
            self._file = _File()
        stream = self._file.stream
        place = stream.seek(0, 2)
        for piece in flat.split(_PIECE):
            stream.write(_bytes_of(piece.cpu()))
        stream.flush()
        return Parked(form, None, self._file, place)


@frozen
class _Form:
    shape: torch.Size
    strides: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        """Return a tensor of this form, its values undefined."""
        place: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        if self.strides is None:
            return torch.empty(self.shape, **place)
        return torch.empty_strided(self.shape, self.strides, **place)


@frozen
class Parked:
    """A tensor's values that wait: in ``copy``, or in a file from ``place`` on. ``bits``: of each
    element, where all are alike, as a failure leaves most gradients.
    """

    form: _Form
    copy: Tensor | None
    file: _File | None
    place: int
    bits: int | None = None

    def nearest(self) -> Tensor:
        """Return the values in host memory where they wait there, not to be written to; else
        ``values``.
        """
        if self.copy is None:
            return self.values()
        form = self.form
        return self.copy.as_strided(form.shape, form.strides or _dense(form.shape))

    def values(self) -> Tensor:
        """Return a tensor like the one that was parked, on its device."""
        whole = self.form.empty()
        flat = _flat(whole)
        if self.bits is not None:
            flat.view(_INTEGERS[flat.element_size()]).fill_(self.bits)
            return whole
        for place, piece in self._beside(flat):
            place.copy_(piece)
        return whole

    def add_to(self, tensor: Tensor) -> None:
        """Add the values to a tensor like the one that was parked, in place: a device may have room
        for it, and for no more than a piece of another.
        """
        if self.bits is not None or tensor.stride() != self.form.strides:
            tensor.add_(self.values())
            return
        for place, piece in self._beside(_flat(tensor)):
            place.add_(piece.to(place.device))

    def _beside(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of a tensor in the order of memory, each with the values that wait for it in
        host memory or a file.
        """
        if self.copy is not None:
            yield from zip(flat.split(_PIECE), self.copy.split(_PIECE), strict=True)
            return
        assert self.file is not None
        stream = self.file.stream
        stream.seek(self.place)
        for place in flat.split(_READ):
            piece = torch.empty_like(place, device="cpu")
            stream.readinto(_bytes_of(piece))  # type: ignore[attr-defined]
            yield place, piece


class ParkedTensors(Mapping[str, Tensor]):
    """Tensors by name that wait; each is read when it is asked for. What waits in host memory is
    had there: on its device there may be no room for the whole of it.
    """

    def __init__(self) -> None:
        self._parking = Parking()
        self._parked: dict[str, Parked] = {}
        self._bad: dict[str, bool] = {}

    def take(self, name: str, tensor: Tensor) -> None:
        """Park a tensor that nobody reads any more, or its sum with the one of that name.
        Synchronises the device.
        """
        if name in self._parked:
            self._parked[name].add_to(tensor)
        self._bad[name] = has_bad(tensor)
        self._parked[name] = self._parking.put(tensor)

    def nonfinite(self) -> tuple[str, ...]:
        """Return the names of those that hold a NaN or Inf, in order. None is read for it."""
        return tuple(name for name, is_bad in self._bad.items() if is_bad)

    def __contains__(self, name: object) -> bool:
        return name in self._parked

    def __getitem__(self, name: str) -> Tensor:
        return self._parked[name].nearest()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parked)

    def __len__(self) -> int:
        return len(self._parked)


class Away:
    """Gradients that are out of the way, where nobody else reads them: each is empty until it comes
    back, bitwise and at the same version.
    """

    def __init__(self, gradients: Iterable[Tensor]) -> None:
        self._parking = Parking()
        self._parked: dict[int, tuple[Tensor, Parked]] = {}
        for gradient in gradients:
            with suppress(OSError), by_torch_alone(), torch.no_grad():  # of a full disk
                if id(gradient) not in self._parked and _is_alone(gradient):
                    self._parked[id(gradient)] = gradient, self._parking.put(gradient)
                    gradient.data = gradient.new_empty(0)

    def __contains__(self, gradient: object) -> bool:
        return id(gradient) in self._parked

    def fetch(self) -> None:
        """Have all of them back that have not been replaced."""
        with by_torch_alone(), torch.no_grad():
            for gradient, parked in list(self._parked.values()):
                gradient.data = parked.values()
                del self._parked[id(gradient)]

    def replace(self, gradient: Tensor, values: Tensor) -> None:
        """Have one of them hold other values from now on, in the memory that these are in."""
        with by_torch_alone(), torch.no_grad():
            del self._parked[id(gradient)]
            gradient.data = values.detach()


def is_tight(leaves: Iterable[Tensor]) -> bool:
    """Return whether there is no room for a run of a step beside the gradients that tensors have
    now: for others, and for what it took beyond what is held now. No synchronisation.
    """
    with by_torch_alone():
        gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    kinds = {gradient.device.type for gradient in gradients}
    needed = sum(gradient.nbytes for gradient in gradients if not gradient.is_sparse)
    for kind in kinds:
        left = room.left_on(kind)
        if left is not None and left < needed + room.most_beyond_now(kind):
            return True
    return False


def _is_alone(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is all its own: nobody reads it but through this object."""
    if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or _order(tensor) is None:
        return False
    return not tensor.requires_grad and 0 < _uses(tensor) <= _USES


def _order(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the order of dimensions in which a tensor's elements lie one behind the other without
    a gap; None where they do not.
    """
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (-tensor.stride(d), -tensor.shape[d])))
    return order if tensor.permute(order).is_contiguous() else None


def _dense(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def _flat(tensor: Tensor) -> Tensor:
    """Return a dense tensor's elements in the order of memory, in one dimension."""
    order = _order(tensor)
    assert order is not None
    return tensor.permute(order).view(-1)


def _all_alike(flat: Tensor) -> int | None:
    """Return the bits of the elements of a tensor where all have the same; None where not."""
    kind = _INTEGERS.get(flat.element_size())
    if kind is None or not flat.numel():
        return None
    bits = flat.view(kind)
    alike = (bool((piece == bits[0]).all()) for piece in bits.split(_PIECE))
    return int(bits[0]) if all(alike) else None


def _bytes_of(tensor: Tensor) -> Any:
    """Return the memory of a tensor in host memory that has no gaps."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _uses(tensor: Tensor) -> int:
    """Return how often a tensor's storage is counted while it has a wrapper in Python: one that is
    gone counts in some versions of torch only. 0 where torch does not say.
    """
    counts = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    return counts(storage._cdata) if counts is not None else 0


def _uses_of_one() -> int:
    alone = torch.empty(1)
    return _uses(alone)


_USES = _uses_of_one()
"""How often a storage is counted that one tensor alone has."""
