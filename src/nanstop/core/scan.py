"""One cheap pass over the values of a large tensor, chunk by chunk, on the integers behind the floats.

The bits of an IEEE float without its sign are an integer that grows with the magnitude, and whatever is not finite lies
above all that is. So one ``&`` and one ``aminmax`` tell of a chunk its range and whether all of it is finite, in less
time than ``abs().max()``; more is looked at only in the chunks where these two say that there is something to see.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from nanstop.core.numerics import format_limit, format_name
from nanstop.records import FormatFit, TensorStats

CHUNK_BYTES = 480 * 2**10
"""A chunk and its magnitudes fit a core's cache, and it has less than 2**16 words of 64 bits (see ``_Counter``)."""

TARGETS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory that chunks are measured in, used again and again. One for each thread."""

    magnitudes: Tensor
    clamped: Tensor

    @classmethod
    def new(cls) -> Scratch:
        return cls(*(torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)))


@dataclass(slots=True)
class Tally:
    """What was counted in some of the values of a tensor. Magnitudes are bit patterns without sign, -1 for none.

    ``at_most``: threshold -> how many of ``num`` magnitudes are not above it; ``at_most_in_part``: of ``num_part``.
    """

    num: int = 0
    posinf: int = 0
    largest: int = -1
    smallest: int = -1
    """Of the finite values; ``smallest`` of those that are not zero."""
    first_bad: int | None = None
    at_most: dict[int, int] = field(default_factory=dict)
    num_part: int = 0
    at_most_in_part: dict[int, int] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Take in the tally of other values of the same tensor."""
        self.num += other.num
        self.posinf += other.posinf
        self.num_part += other.num_part
        self.largest = max(self.largest, other.largest)
        self.smallest = min((p for p in (self.smallest, other.smallest) if p >= 0), default=-1)
        firsts = (at for at in (self.first_bad, other.first_bad) if at is not None)
        self.first_bad = min(firsts, default=None)
        _add_counts(self.at_most, other.at_most)
        _add_counts(self.at_most_in_part, other.at_most_in_part)


def _add_counts(mine: dict[int, int], theirs: dict[int, int]) -> None:
    for threshold, count in theirs.items():
        mine[threshold] = mine.get(threshold, 0) + count


@dataclass(frozen=True, slots=True)
class Cast:
    """Magnitudes (bit patterns of the source) at which a cast changes its nature; each is the last on its side.

    ``zero``: still rounds to zero. ``subnormal``: still below the target's smallest normal number. ``finite``: still
    rounds to a finite number.
    """

    zero: int
    subnormal: int
    finite: int


def computed_in(dtype: torch.dtype) -> torch.dtype | None:
    """Return the format in which values of ``dtype`` are counted: itself, float32 for 8 bits, None for no float."""
    if not dtype.is_floating_point:
        return None
    return dtype if dtype.itemsize in _INTEGERS else torch.float32


@cache
def cast(source: torch.dtype, target: torch.dtype) -> Cast:
    """Return what becomes of magnitudes of ``source`` in ``target``: rounding to nearest, ties to even.

    float8_e4m3fn has no infinity and ends at 448 = 1.75 * 2**8: 464 still rounds down to it, as its last bit is even;
    what lies above is NaN or cut to 448, depending on the version of torch.
    """
    info, top = torch.finfo(target), format_limit(target)
    half_unit = 2.0 ** math.floor(math.log2(top)) * info.eps / 2
    tie_is_finite = target is torch.float8_e4m3fn
    last = _last(source, top + half_unit)
    if not tie_is_finite and _value(source, last) == top + half_unit:
        last -= 1
    return Cast(
        zero=_last(source, info.tiny * info.eps / 2),
        subnormal=_last_subnormal(source, target),
        finite=min(last, _infinity(source) - 1),
    )


def tally(
    values: Tensor, scratch: Scratch, *, start: int, stored: torch.dtype, in_part: bool
) -> Tally:
    """Return what there is to count in a chunk: flat, contiguous, in a ``computed_in`` format, at most CHUNK_BYTES.

    ``start``: position of its first value in the tensor, whose format is ``stored``. ``in_part``: count here what is
    counted in a part of the tensor only. For values in the host's memory.
    """
    kind = _INTEGERS[values.dtype.itemsize]
    bits, infinity = values.view(kind), _infinity(values.dtype)
    counter = _Counter.of(bits, scratch)
    found = Tally(num=len(bits), largest=counter.most, smallest=counter.least)
    if counter.most >= infinity:
        bad = counter.magnitudes >= infinity
        found.posinf = int((bits == infinity).sum())
        found.first_bad = start + int(bad.to(torch.uint8).argmax())
        found.largest = int(counter.magnitudes.masked_fill(bad, -1).amax())
    if counter.least == 0:
        found.smallest = counter.smallest_above_zero()
    if found.smallest >= infinity:
        found.smallest = -1
    always, sometimes = _thresholds(values.dtype, stored)
    found.at_most = {threshold: counter.at_most(threshold) for threshold in always}
    if in_part:
        found.num_part = len(bits)
        found.at_most_in_part = {threshold: counter.at_most(threshold) for threshold in sometimes}
    return found


@cache
def _thresholds(source: torch.dtype, stored: torch.dtype) -> tuple[tuple[int, ...], ...]:
    """Return what is counted everywhere, and what in a part: how many values of 8-bit formats would be small."""
    infinity = _infinity(source)
    always = {0, _last_subnormal(source, stored), infinity - 1, infinity}
    sometimes: set[int] = set()
    for target in TARGETS:
        edges = cast(source, target)
        always.add(edges.finite)
        (sometimes if target.itemsize == 1 else always).update((edges.zero, edges.subnormal))
    return tuple(sorted(always)), tuple(sorted(sometimes))


@dataclass(frozen=True, slots=True)
class _Counter:
    """Counts magnitudes up to a threshold without a mask of them.

    Clamped to [t, t + 1], each magnitude is t where it counts and t + 1 where it does not. Summed as 64-bit words with
    several magnitudes to a word, modulo 2**64, the difference to "none counts" holds one count for each lane of a word.
    None can overflow its lane, as a chunk has less than 2**16 words.
    """

    magnitudes: Tensor
    padded: Tensor
    clamped: Tensor
    least: int
    most: int

    @classmethod
    def of(cls, bits: Tensor, scratch: Scratch) -> _Counter:
        lanes = 8 // bits.itemsize
        whole = -(-len(bits) // lanes) * lanes
        largest = torch.iinfo(bits.dtype).max
        padded = scratch.magnitudes.view(bits.dtype)[:whole]
        clamped = scratch.clamped.view(bits.dtype)[:whole]
        padded[len(bits) :] = largest
        magnitudes = torch.bitwise_and(bits, largest, out=padded[: len(bits)])
        least, most = magnitudes.aminmax()
        return cls(magnitudes, padded, clamped, int(least), int(most))

    def at_most(self, threshold: int) -> int:
        """Return how many magnitudes are not above ``threshold``."""
        if self.most <= threshold:
            return len(self.magnitudes)
        if self.least > threshold:
            return 0
        lanes = 8 // self.padded.itemsize
        width = 64 // lanes
        words = torch.clamp(self.padded, threshold, threshold + 1, out=self.clamped).view(
            torch.int64
        )
        ones = sum(1 << (width * lane) for lane in range(lanes))
        below = ((threshold + 1) * ones * len(words) - int(words.sum())) % 2**64
        return sum(below >> (width * lane) & (2**width - 1) for lane in range(lanes))

    def smallest_above_zero(self) -> int:
        """Return the smallest magnitude but zero, above every number where there is none."""
        largest = torch.iinfo(self.padded.dtype).max
        less_one = torch.sub(self.padded, 1, out=self.clamped)  # zero becomes -1, then the largest
        return int(less_one.bitwise_and_(largest).amin()) + 1


def _value(dtype: torch.dtype, pattern: int) -> float:
    if pattern < 0:
        return 0.0
    return float(torch.tensor(pattern, dtype=_INTEGERS[dtype.itemsize]).view(dtype))


def _last(dtype: torch.dtype, bound: float, *, below: bool = False) -> int:
    """Return the pattern of the largest number of ``dtype`` up to ``bound`` (or below it)."""
    nearest = torch.tensor(bound, dtype=torch.float64).to(dtype)
    pattern, value = int(nearest.view(_INTEGERS[dtype.itemsize])), float(nearest)
    return pattern - 1 if value > bound or (below and value == bound) else pattern


def _last_subnormal(source: torch.dtype, target: torch.dtype) -> int:
    return _last(source, torch.finfo(target).tiny, below=True)


def _infinity(dtype: torch.dtype) -> int:
    return _last(dtype, math.inf)


def stats_of(found: Tally, shape: tuple[int, ...], stored: torch.dtype, name: str) -> TensorStats:
    """Return the range of a tensor from the tally of all its values."""
    source = _source(stored)
    infinity = _infinity(source)
    counts = found.at_most
    bad = found.num - counts[infinity - 1] if found.num else 0
    nan = found.num - counts[infinity] if found.num else 0
    return TensorStats(
        shape=shape,
        dtype=format_name(stored),
        nan=nan,
        posinf=found.posinf,
        neginf=bad - nan - found.posinf,
        absmax=_value(source, found.largest),
        absmin_nonzero=_value(source, found.smallest),
        zeros=counts.get(0, 0),
        subnormal=counts.get(_last_subnormal(source, stored), 0) - counts.get(0, 0),
        first_bad=_unravelled(found.first_bad, shape),
        name=name,
    )


def fits_of(found: Tally, stored: torch.dtype) -> tuple[FormatFit, ...]:
    """Return what casting the tensor to each narrow format would do, from the tally of all its values."""
    return tuple(_fit(found, _source(stored), target) for target in TARGETS) if found.num else ()


def _fit(found: Tally, source: torch.dtype, target: torch.dtype) -> FormatFit:
    edges, narrow = cast(source, target), target.itemsize == 1
    counts, of = (found.at_most_in_part, found.num_part) if narrow else (found.at_most, found.num)
    none, exact = found.at_most[0], of == found.num
    zero, small = (
        round(counts.get(each, 0) * found.num / of) for each in (edges.zero, edges.subnormal)
    )
    if (
        found.smallest > edges.subnormal or found.largest < 0
    ):  # known of all values, whatever the part held
        zero, small, exact = none, none, True
    absmax = _value(source, found.largest)
    return FormatFit(
        format=format_name(target),
        headroom_bits=math.log2(format_limit(target) / absmax) if absmax else math.inf,
        overflow=found.at_most[_infinity(source) - 1] - found.at_most[edges.finite],
        subnormal=max(small - zero, 0),
        zero=max(zero - none, 0),
        exact=exact,
    )


def _source(stored: torch.dtype) -> torch.dtype:
    source = computed_in(stored)
    if source is None:
        raise TypeError(f"{stored} is not a floating-point format")
    return source


def _unravelled(flat: int | None, shape: Iterable[int]) -> tuple[int, ...] | None:
    if flat is None:
        return None
    index: list[int] = []
    for size in reversed(tuple(shape)):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))
