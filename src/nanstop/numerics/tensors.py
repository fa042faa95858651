"""Ranges of tensors and the formats that hold them."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from nanstop.records import FORMAT_MAX, TensorStats, formats

HALF = tuple(getattr(torch, name) for name in formats.HALF)
_NOT_LOOKED_INTO = (nn.Module, type, FunctionType, MethodType, ModuleType, torch.ScriptObject)
_MOST_OBJECTS, _LONGEST = 64, 256
"""Objects of other classes that are looked into, and containers of theirs: one may lead to a whole
data set.
"""
HOLD_NOTHING = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
"""Classes of which no object holds a tensor."""
_DISPATCH = "__torch_dispatch__"
_NO_DISPATCH = getattr(torch.Tensor, _DISPATCH)


_PIECE = 2**22
"""Elements of a large tensor that are looked at at a time: a look makes several times their memory,
and what looks may do so where little is left.
"""

by_torch_alone = torch._C.DisableTorchFunction
"""Reading a tensor's attributes is a call that function modes of a script would see."""


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in a result or an argument list, always in the same order.

    Also those that an object of any other class has as attributes: a model may return a
    distribution. A mapping that is neither a dict nor a ``UserDict`` is one of these, and of a dict
    only what it holds itself is seen: asking a class of its own for its values may load or draw
    them. Modules are not looked into.
    """
    found: list[Tensor] = []
    _collect((value,), found, None)
    return found


def _collect(values: Iterable[Any], found: list[Tensor], objects: set[int] | None) -> None:
    """Add the tensors in some values; ``objects``: ids of those that they are attributes of."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in HOLD_NOTHING:
            continue
        elif isinstance(value, (tuple, list)):
            if objects is None or len(value) <= _LONGEST:
                _collect(value, found, objects)
        elif isinstance(value, (dict, UserDict)):
            held = dict.values(value) if isinstance(value, dict) else value.values()
            if objects is None or len(held) <= _LONGEST:
                _collect(held, found, objects)
        elif is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in fields(value)]  # one may have no value yet
            _collect([getattr(value, name, None) for name in names], found, objects)
        elif not isinstance(value, _NOT_LOOKED_INTO) and hasattr(value, "__dict__"):
            known = set() if objects is None else objects
            if id(value) not in known and len(known) < _MOST_OBJECTS:
                known.add(id(value))
                attributes = list(vars(value).values())
                if len(attributes) <= _LONGEST:
                    _collect(attributes, found, known)


def version(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; inference tensors do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def bytes_of(*given: Tensor) -> int:
    """Return what the values of tensors take; ``Tensor.nbytes`` raises for a sparse one."""
    num = 0
    for tensor in given:
        if tensor.layout is not torch.sparse_coo:
            num += tensor.nbytes
        else:
            num += tensor._indices().nbytes + tensor._values().nbytes
    return num


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OPERATORS += ("and", "or", "xor", "lshift", "rshift")
_IN_PLACE = frozenset(("__setitem__", *(f"__i{name}__" for name in _OPERATORS)))


def is_in_place(name: str) -> bool:
    """Return whether a function of torch writes its first argument, by torch's rule for names."""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def format_name(dtype: torch.dtype) -> str:
    """Return ``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def format_limit(dtype: torch.dtype) -> float:
    """Return the largest finite value of a floating format, inf for any other."""
    return FORMAT_MAX.get(format_name(dtype), float("inf"))


def widened(used: Iterable[torch.dtype]) -> dict[torch.dtype, torch.dtype]:
    """Return, for an op that uses some formats, in what each is run again to learn whether its
    range was too narrow.

    float16 and the 8-bit floats become float32. bfloat16 has the range of float32:
    both become float64. Complex ones become complex128.
    """
    used = set(used)
    present = {f for f in used if f.is_floating_point}
    paired = dict.fromkeys((f for f in used if f.is_complex), torch.complex128)
    short = {f for f in present if f.itemsize < 4 and f is not torch.bfloat16}
    if short and not paired:
        return dict.fromkeys(present & (short | {torch.bfloat16}), torch.float32)
    return dict.fromkeys(present, torch.float64) | paired


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: MPS does not."""
    try:
        torch.empty(0, dtype=torch.float64, device=device)  # takes no memory, which may be short
    except (TypeError, RuntimeError):
        return False
    return True


def in_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the host where its device has none."""
    return (tensor if has_float64(tensor.device) else tensor.cpu()).double()


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is dense, strided, on a real device, and known by its address.

    A nested, sparse or meta tensor is not, nor a subclass that answers torch itself.
    """
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.device.type != "meta"
        and getattr(type(tensor), _DISPATCH) is _NO_DISPATCH
    )


def is_measurable(tensor: Tensor) -> bool:
    """Return whether a tensor holds dense floating or complex values that can be looked at here."""
    return is_inexact(tensor) and is_plain(tensor) and tensor.numel() > 0


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor is of a floating or complex format: one that can hold a NaN."""
    return tensor.is_floating_point() or tensor.is_complex()


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the plain tensors that hold a tensor's values:
    itself, or what a sparse or wrapper tensor is made of.
    """
    if is_traceable_wrapper_subclass(tensor):
        held = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        # A sharded one may name the mesh of its devices as well.
        return tuple(p for one in held if isinstance(one, Tensor) for p in dense_parts(one))
    if tensor.layout is torch.sparse_coo:
        return (tensor._values(),)
    if tensor.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return (tensor.values(),)
    return (tensor,) if is_plain(tensor) else ()


def floats(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the real floating tensors that hold a tensor's values, detached:
    complex ones as pairs, 8-bit ones widened.
    """
    for part in map(Tensor.detach, filter(is_measurable, dense_parts(tensor))):
        if part.is_complex():
            yield torch.view_as_real(part.resolve_conj())
        else:
            yield part.float() if part.dtype.itemsize == 1 else part


def odd_stride(total: int, most: int) -> int:
    """Return the distance of evenly spread elements, ``most`` of them at most: an even one may meet
    the same column of every row.
    """
    return 1 if total <= most else -(-total // most) | 1


def spread(tensor: Tensor, most: int) -> Tensor:
    """Return evenly spread elements [up to ``most``], a view where the tensor is contiguous."""
    flat = tensor.detach().reshape(-1)
    return flat[:: odd_stride(flat.numel(), most)]


def ramp(tensor: Tensor) -> Tensor:
    """Return numbers of a floating tensor's shape, format and device, evenly from 0 to 1."""
    evenly = torch.linspace(0.0, 1.0, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return evenly.view(tensor.shape)


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a plain tensor's elements in order, in one dimension and ``_PIECE`` at a time: views
    where the tensor is contiguous, else a copy of each piece.
    """
    if tensor.numel() <= _PIECE:
        yield tensor.reshape(-1)
    elif tensor.is_contiguous():
        yield from tensor.view(-1).split(_PIECE)
    else:
        row = tensor.numel() // tensor.shape[0]
        if row > _PIECE:
            for one in tensor.unbind():
                yield from pieces(one)
        else:
            yield from (rows.reshape(-1) for rows in tensor.split(_PIECE // row))


def as_numbers(values: Sequence[Any]) -> list[float]:
    """Return numbers and 0-dim tensors as floats. Each device that has some is synchronised once,
    and by nothing that a dispatch mode hears of.
    """
    found = [math.nan] * len(values)
    far: dict[torch.device, list[int]] = {}
    for at, value in enumerate(values):
        if isinstance(value, Tensor) and value.device.type != "cpu":
            far.setdefault(value.device, []).append(at)
        else:
            found[at] = float(value)
    if far:
        with _disable_current_modes(), torch.no_grad():
            for places in far.values():
                read = torch.stack([values[at].detach().float().reshape(()) for at in places])
                for at, number in zip(places, read.tolist(), strict=True):
                    found[at] = number
    return found


def has_bad(tensor: Tensor) -> bool:
    """Return whether a tensor of any kind holds a NaN or Inf. Synchronises the device."""
    return bool(nonfinite({"": tensor}))


def bad_mask(tensor: Tensor) -> Tensor:
    """Return a bool tensor of the same shape: True where the value is NaN or infinite."""
    if tensor.numel() > _PIECE and is_plain(tensor) and tensor.is_contiguous():
        flat = tensor.detach().view(-1)
        mask = torch.empty(flat.shape, dtype=torch.bool, device=flat.device)
        for place, part in zip(mask.split(_PIECE), flat.split(_PIECE), strict=True):
            place.copy_(bad_mask(part))
        return mask.view(tensor.shape)
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        tensor = tensor.float()  # 8-bit floats have no isfinite
    return ~torch.isfinite(tensor)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the lengths of a tensor's dimensions; none of a nested one, whose rows differ."""
    return () if tensor.is_nested else tuple(tensor.shape)


@torch.no_grad()
def measure(tensor: Tensor, name: str | None = None) -> TensorStats:
    """Return the full range of a tensor of any shape and format.

    Synchronises the device.

    ``absmax`` and ``absmin_nonzero`` are magnitudes of finite values; integer tensors report
    ``absmax``, ``minimum`` and ``zeros`` only, and of a tensor that cannot be looked at (meta,
    nested, quantized, empty) only shape and format are known.
    """
    shape = shape_of(tensor)
    known = {"shape": shape, "dtype": format_name(tensor.dtype), "device": tensor.device.type}
    parts = [p.detach() for p in dense_parts(tensor) if p.numel() > 0 and not p.is_quantized]
    if not parts:
        return TensorStats(**known, name=name)
    values = parts[0]
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    if not values.is_floating_point():
        ends = [_ends_of(piece) for piece in pieces(values)]
        return TensorStats(
            **known,
            absmax=max(most for most, _ in ends),
            minimum=min(least for _, least in ends),
            zeros=values.numel() - sum(int(piece.count_nonzero()) for piece in pieces(values)),
            name=name,
        )
    return _ranged(values, known, name, located=values.shape == shape)


def _ends_of(whole: Tensor) -> tuple[float, float]:
    """Return the largest magnitude of whole numbers, and the least number."""
    wide = in_float64(whole)
    return float(wide.abs().max()), float(wide.min())


def _ranged(values: Tensor, known: dict, name: str | None, *, located: bool) -> TensorStats:
    tiny = torch.finfo(values.dtype).tiny
    counts, ends = zip(*(_looked_at(piece, tiny) for piece in pieces(values)), strict=True)
    each = torch.stack(counts)
    totals, bad = each.sum(0).tolist(), each[:, :3].sum(1).tolist()
    absmax, least_size, least = torch.stack(ends).amax(0).tolist()
    return TensorStats(
        **known,
        nan=totals[0],
        posinf=totals[1],
        neginf=totals[2],
        absmax=absmax,
        absmin_nonzero=-least_size if totals[3] else 0.0,
        minimum=-least if least > -math.inf else 0.0,
        zeros=totals[4],
        subnormal=totals[5],
        first_bad=_first_bad(values, bad) if located and any(bad) else None,
        name=name,
    )


def _looked_at(piece: Tensor, tiny: float) -> tuple[Tensor, Tensor]:
    """Return how many values are NaN, Inf, -Inf, neither of these nor 0, 0, and below ``tiny``;
    and the largest magnitude, the least one above 0 and the least value, both negated: -inf where
    there is none.
    """
    values = piece if piece.dtype is torch.float64 else piece.float()
    bad = bad_mask(values)
    size = values.abs().masked_fill_(bad, 0.0)
    nonzero = size > 0
    counts = torch.stack(
        [
            values.isnan().sum(),
            values.isposinf().sum(),
            values.isneginf().sum(),
            nonzero.sum(),
            (~bad & ~nonzero).sum(),
            (nonzero & (size < tiny)).sum(),
        ]
    )
    most, least = size.max(), values.masked_fill(bad, math.inf).min()
    return counts, torch.stack([most, -size.masked_fill_(~nonzero, math.inf).min(), -least])


def _first_bad(values: Tensor, bad: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the first bad value; ``bad``: how many there are in each piece."""
    place = 0
    for piece, num in zip(pieces(values), bad, strict=True):
        if num:
            first = int(bad_mask(piece).to(torch.uint8).argmax())
            return place_of(place + first, values.shape)
        place += piece.numel()
    raise AssertionError


def place_of(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the index, along each axis of a shape, of the element of this number."""
    return tuple(int(axis) for axis in torch.unravel_index(torch.tensor(flat), tuple(shape)))


@torch.no_grad()
def nonfinite(named: Mapping[str, Tensor | None]) -> tuple[str, ...]:
    """Return the names of tensors that hold a NaN or Inf, in order;
    what holds no floating values counts as finite.

    The smallest and the largest value tell, and are NaN where any value is: each value is read once
    and nothing of that size is made (0.2 ns an element on one core, where ``isfinite().all()``
    takes 12). Entries of a sparse tensor count as their sum. One synchronisation for each device.
    """
    fine: dict[str, bool] = {}
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in named.items():
        if tensor is None:
            continue
        fine[name] = True
        for part in floats(tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor):
            by_device.setdefault(part.device, []).append((name, part))
    for held in by_device.values():
        ends = torch.stack([end for _, part in held for end in part.aminmax()])
        flags = ends.isfinite().view(-1, 2).all(1).tolist()
        for (name, _), flag in zip(held, flags, strict=True):
            fine[name] &= flag
    return tuple(name for name, flag in fine.items() if not flag)
