"""A second look at a few ops of a run:
full statistics, the same op in a wider format, masks, positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanstop.frozen import frozen
from nanstop.numerics.exponents import exponent_counts
from nanstop.numerics.host_memory import lacks_memory
from nanstop.numerics.room import give_back_after
from nanstop.numerics.tensors import (
    bad_mask,
    dense_parts,
    is_measurable,
    is_plain,
    measure,
)
from nanstop.records import Finiteness, LineNumber, TensorStats, Unwritten
from nanstop.records.values import origin_of
from nanstop.tracing import operators
from nanstop.tracing.definitions.once_more import rerun_reference, rerun_wider, unwritten
from nanstop.tracing.operators import operands_of, outputs_of
from nanstop.tracing.places import frames_within, user_frame
from nanstop.tracing.source.holders import Holder, holder_of
from nanstop.tracing.source.line_numbers import zeros_handed_on, zeros_of_line

StorageNames = Mapping[int, Sequence[tuple[range, str]]]
"""By the address of a storage the bytes that each tensor with a name takes there."""
_MASK_FRACTION = 0.9
MOST_ON_DEVICE = 2**24
"""Elements of a mask that waits on a device, a byte each: a larger one waits in host memory."""
_WITH_A_POLE = frozenset({"div", "reciprocal", "rsqrt"})
_MASK_REPEATS = 4
"""A mask holds next to the lowest value of its format, the same few numbers again and again. Scores
and residuals that come so low are single values, each another.
"""


@frozen
class OpDetails:
    """Full facts of one op. ``masking``: whether its infinities stand exactly where it adds or
    converts a mask.

    ``fully_masked_rows``: rows that are -inf throughout, in what it read or in what it made of
    finite operands. ``hides``: whether they are a mask's, see ``_is_mask_of``.

    ``bad`` and ``read``: for each output and operand, its bool mask of bad elements (None where it
    has none), on the device or in host memory. ``held``: for each operand that is bad and no
    parameter, the script's variable that holds it. ``zeros``: what a 0 of the program's is
    spelled as that it divides by, or that is added to what it divides by.
    """

    op: str
    inputs: tuple[TensorStats, ...]
    outputs: tuple[TensorStats, ...] = ()
    wider: Finiteness = "unknown"
    reference: Finiteness = "unknown"
    unwritten: Unwritten | None = None
    fully_masked_rows: int = 0
    hides: bool = False
    masking: bool = False
    bad: tuple[Tensor | None, ...] = ()
    read: tuple[Tensor | None, ...] = ()
    held: tuple[Holder | None, ...] = ()
    zeros: tuple[LineNumber, ...] = ()


class Observer:
    """Called for each op of a second run;
    keeps ``OpDetails`` of those in ``wanted``. Synchronises the device.

    ``names``: what tensors known by name are called, see ``storage_names``. ``on_device``: elements
    that a mask may have and still wait there. A look that memory is too short for leaves the others
    what they have seen.
    """

    def __init__(
        self, wanted: Iterable[int], names: StorageNames, on_device: int = MOST_ON_DEVICE
    ) -> None:
        self.seen: dict[int, OpDetails] = {}
        self._wanted = frozenset(wanted)
        self._names, self._on_device = names, on_device

    def __call__(
        self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        """Look at the operands before the op runs; return what is to be called with its result."""
        if index not in self._wanted:
            return None
        traits = operators.traits(func)
        read = operands_of(func, args, kwargs)
        # Of an op that raises there is no result to look at; its operands are what there is to say.
        before = OpDetails(str(func), tuple(self._measured(tensor) for tensor in read))
        before = replace(before, held=tuple(map(_holder, read, before.inputs)))
        if traits.base in _WITH_A_POLE:
            before = replace(before, zeros=_zeros(before.inputs, operators.scalars(args, kwargs)))
        self.seen[index] = before
        masked = fully_masked_rows(read)
        kept = [t.clone() for t in read] if traits.mutated else read
        kept_args = replaced(args, dict(zip(map(id, read), kept, strict=True)))

        def done(result: Any) -> None:
            outputs = outputs_of(func, args, kwargs, result)
            bad = tuple(_bad_or_none(o) for o in outputs)
            bad_read = tuple(_bad_or_none(t) for t in kept)
            is_made = all(mask is None for mask in bad_read)
            found = replace(
                before,
                fully_masked_rows=masked,
                hides=masked > 0,
                bad=tuple(map(self._waiting, bad)),
                read=tuple(map(self._waiting, bad_read)),
            )
            del bad_read
            seen: dict[str, Any] = {}
            looks: dict[str, Callable[[], Any]] = {
                "outputs": lambda: tuple(self._measured(o) for o in outputs),
                "wider": lambda: rerun_wider(func, kept_args, kwargs, bad),
                "reference": lambda: rerun_reference(func, kept_args, kwargs, bad),
                "unwritten": lambda: unwritten(func, args, kwargs, outputs, bad),
                "fully_masked_rows": lambda: max(
                    masked, fully_masked_rows(outputs) if is_made else 0
                ),
                "masking": lambda: is_masking(traits.base, kept, outputs),
                "hides": lambda: (
                    masked > 0 and _is_mask_of(func, kept_args, kwargs, kept, before.inputs)
                ),
            }
            for name, look in looks.items():
                _if_there_is_room(seen, name, look)
            self.seen[index] = replace(found, **seen)
            give_back_after((*read, *outputs), self._on_device)

        return done

    def _waiting(self, mask: Tensor | None) -> Tensor | None:
        return mask.cpu() if mask is not None and mask.numel() > self._on_device else mask

    def _measured(self, tensor: Tensor) -> TensorStats:
        name = _name_of(tensor, self._names) if is_plain(tensor) else None
        counts: tuple[tuple[int, int], ...] = ()
        with suppress(Exception):  # a device that cannot take numbers apart
            counts = exponent_counts(tensor)
        return replace(measure(tensor, name), exponents=counts)


def _if_there_is_room(seen: dict[str, Any], name: str, look: Callable[[], Any]) -> None:
    """Note what a look sees, unless memory is too short for it."""
    try:
        seen[name] = look()
    except Exception as error:
        if not lacks_memory(error):
            raise


def _holder(tensor: Tensor, stats: TensorStats) -> Holder | None:
    own = origin_of(stats.name) in ("unknown", "from_batch", "from_buffer")
    return holder_of(tensor) if own and not stats.finite else None


def _zeros(read: Iterable[TensorStats], numbers: Iterable[float]) -> tuple[LineNumber, ...]:
    frame = user_frame()
    if frame is None:
        return ()
    if 0.0 in numbers:
        called = frames_within(frame)
        return zeros_of_line(frame, "divisor") or zeros_handed_on(frame, called, "divisor")
    return zeros_of_line(frame, "addend") if any(stats.zeros for stats in read) else ()


def _bad_or_none(tensor: Tensor) -> Tensor | None:
    if not is_measurable(tensor):
        return None
    mask = bad_mask(tensor)
    return mask if bool(mask.any()) else None


def storage_names(named: Mapping[str, Tensor]) -> StorageNames:
    """Return the names of tensors by the address of the storages that hold them, each with the
    bytes that it takes there: several may lie in one.
    """
    found: dict[int, list[tuple[range, str]]] = {}
    for name, tensor in named.items():
        for part in dense_parts(tensor):
            entries = found.setdefault(part.untyped_storage()._cdata, [])
            entries.append((_bytes_of(part), name))
    return found


def _name_of(tensor: Tensor, names: StorageNames) -> str | None:
    """Return the first name of what a tensor begins in, None where its storage has none."""
    entries = names.get(tensor.untyped_storage()._cdata, ())
    begin = _bytes_of(tensor).start
    inside = (name for taken, name in entries if begin in taken)
    return next(inside, entries[0][1] if entries else None)


def _bytes_of(tensor: Tensor) -> range:
    """Return the bytes of its storage that a tensor lies in, from its first to its last element."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True) if tensor.numel() else ()
    last = sum((size - 1) * stride for size, stride in sizes)
    begin = tensor.storage_offset() * tensor.element_size()
    return range(begin, begin + (last + 1) * tensor.element_size())


def fully_masked_rows(operands: Iterable[Tensor]) -> int:
    """Return the most rows (last axis) of one operand that are -inf throughout."""
    count = 0
    for tensor in operands:
        if is_measurable(tensor) and tensor.dim() >= 2 and tensor.shape[-1] >= 2:
            count = max(count, int((tensor == float("-inf")).all(-1).sum()))
    return count


def _is_mask_of(
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    read: Sequence[Tensor],
    stats: Sequence[TensorStats],
) -> bool:
    """Return whether rows that are -inf throughout are hidden, and are no data that the op cannot
    compute with: where it reads them as they came in the batch, one place of each in sight has to
    be enough. What adds to a mask, or chooses by one, has a value then; a product with weights, a
    mean or a norm of such a row has none.
    """
    given = [t for t, seen in zip(read, stats, strict=True) if _is_given(seen)]
    shown = {id(t): _in_sight(t) for t in given if fully_masked_rows((t,))}
    if not shown:
        return True
    again, named = replaced_in(args, kwargs, shown)
    outputs = outputs_of(func, again, named, func(*again, **named))
    return all(_bad_or_none(output) is None for output in outputs)


def _is_given(stats: TensorStats) -> bool:
    return origin_of(stats.name) == "from_batch" and stats.neginf > 0


def _in_sight(tensor: Tensor) -> Tensor:
    """Return a mask with 0 first in each row that is -inf throughout."""
    rows, shown = (tensor == float("-inf")).all(-1), tensor.clone()
    shown[..., 0] = shown[..., 0].masked_fill(rows, 0.0)
    return shown


def is_masking(base: str, operands: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    """Return whether an op's infinities are -inf and all stand where a mask was added to something,
    scaled with it, or converted.

    In float16 ``score + finfo.min`` rounds to -inf for every score below -16, and a mask made with
    the lowest number of float32 is -inf throughout, as is one that a temperature divides: meant,
    not an overflow.
    """
    if base not in operators.ADDITIVE | operators.CASTS | operators.SCALES:
        return False
    result = next(iter(outputs))
    if not is_measurable(result) or not result.is_floating_point():
        return False
    result = result.float() if result.dtype.itemsize == 1 else result  # 8-bit floats have no isinf
    if bool((result.isnan() | result.isposinf()).any()):
        return False
    infinite = result.isneginf()
    masked = torch.zeros_like(infinite)
    for tensor in operands:
        if is_measurable(tensor) and tensor.is_floating_point():
            lowest = tensor <= torch.finfo(tensor.dtype).min * _MASK_FRACTION
            if base in operators.CASTS:
                lowest &= (
                    tensor.isfinite()
                )  # an infinity that is only passed on is of others' making
            levels = tensor[lowest].unique().numel()
            if int(lowest.sum()) >= _MASK_REPEATS * levels:
                masked = masked | lowest
    return bool((masked | ~infinite).all())


def replaced(args: Any, copies: Mapping[int, Tensor]) -> tuple[Any, ...]:
    """Return arguments with tensors exchanged, by their ids."""
    return tuple(
        [copies.get(id(item), item) for item in arg]
        if isinstance(arg, list | tuple)
        else copies.get(id(arg), arg)
        for arg in args
    )


def replaced_in(
    args: Any, kwargs: Mapping[str, Any], copies: Mapping[int, Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments and named ones with tensors exchanged, by their ids."""
    named = zip(kwargs, replaced(tuple(kwargs.values()), copies), strict=True)
    return replaced(args, copies), dict(named)
