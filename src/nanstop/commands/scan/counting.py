"""One cheap pass over the values of a large tensor, in chunks, on the integers behind floats.

The bits of an IEEE float without its sign are an integer that grows with the magnitude, and
whatever is not finite lies above all that is. So one ``&`` and one ``aminmax`` tell of a chunk its
range and whether all of it is finite, in less time than ``abs().max()``; more is looked at only in
the chunks where these two say that there is something to see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from nanstop.numerics.tensors import format_limit, format_name, place_of
from nanstop.records import FormatFit, TensorStats

CHUNK_BYTES = 1920 * 2**10
"""A chunk and its magnitudes stay in a core's caches; with larger ones each pass would go to
memory, with smaller ones threads wait for each other's lines of Python.
"""

_SUMMED_WORDS = 2**16 - 1

_ROW, _FEW, _ROWS_WITH_ZEROS = 2048, 2**16, 16
"""Zeros are looked for in rows of so many magnitudes, where there are more than a few, unless more
than one row in so many holds a zero: random weights of 16 bits have one in a chunk now and then.
"""

TARGETS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

_RARE = 1e-30
"""Weights below this are rare: so are most subnormals, but for those of float16 and of 8 bits."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory of one thread that chunks are measured in, again and again: CHUNK_BYTES each.

    ``spare`` may be the memory of the chunk itself, whose values are then gone after its tally.
    """

    magnitudes: Tensor
    spare: Tensor

    @classmethod
    def new(cls) -> Scratch:
        """Return two uint8 buffers of ``CHUNK_BYTES`` on the host, to be used for every chunk."""
        return cls(*(torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)))


@dataclass(slots=True)
class Tally:
    """What was counted in some values of a tensor. Magnitudes: bits without sign, -1 for none.

    ``at_most``: threshold -> how many of ``num`` magnitudes are not above it;
    ``at_most_in_part``: of ``num_part``.
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
    """The last magnitudes (bits of the source) before a cast changes its nature.

    ``zero``: still rounds to zero. ``subnormal``: still below the target's smallest normal number.
    ``finite``: still rounds to a finite number.
    """

    zero: int
    subnormal: int
    finite: int


def computed_in(dtype: torch.dtype) -> torch.dtype | None:
    """Return the format that values are counted in: their own, float32 for 8 bits, or None."""
    if not dtype.is_floating_point:
        return None
    return dtype if dtype.itemsize in _INTEGERS else torch.float32


@cache
def cast(source: torch.dtype, target: torch.dtype) -> Cast:
    """Return what becomes of magnitudes of ``source`` in ``target``: rounding to nearest, ties to
    even.

    float8_e4m3fn has no infinity and ends at 448 = 1.75 * 2**8: 464 still rounds down to it, as its
    last bit is even; what lies above is NaN or cut to 448, depending on the version of torch.
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


class Meter:
    """Counts the values of one tensor, chunk after chunk.

    To count magnitudes up to a threshold t without a mask of them, they are clamped to [t, t + 1]
    and summed as 64-bit words of several magnitudes each, modulo 2**64. The difference to "none
    counts" holds a count in each lane of a word; none overflows its lane, as less than 2**16 words
    are summed at a time.
    """

    def __init__(self, stored: torch.dtype, scratch: Scratch) -> None:
        """``stored``: the tensor's format; chunks come in ``computed_in(stored)``."""
        self._asked = _asked(_source(stored), stored)
        kind = self._asked.kind
        self._magnitudes, self._spare = scratch.magnitudes.view(kind), scratch.spare.view(kind)
        self._words = scratch.spare.view(torch.int64)
        self._found = Tally()
        edges = torch.empty(2, dtype=kind)
        self._edges, self._least_most = (edges[0], edges[1]), edges.numpy()
        self._values = self._bits = self._taken = self._magnitudes[:0]
        self._always = [0] * len(self._asked.always)
        self._in_part = [0] * len(self._asked.in_part)

    def take(self, values: Tensor, *, start: int, part: int) -> None:
        """Count a flat, contiguous chunk of at most CHUNK_BYTES in the host's memory.

        ``start``: position of its first value in the tensor. ``part``: in how many of its first
        values to count also what costs most, the small values; where that is not all, a few less.
        """
        asked, found, num = self._asked, self._found, values.numel()
        if values is not self._values:
            self._values, self._bits = values, values.view(asked.kind)
            self._taken = self._magnitudes[:num]
        bits, magnitudes = self._bits, self._taken
        whole = -(-num // asked.lanes) * asked.lanes
        if whole > num:
            self._magnitudes[num:whole] = asked.largest
        torch.aminmax(torch.bitwise_and(bits, asked.largest, out=magnitudes), out=self._edges)
        least, most = self._least_most.tolist()
        found.num += num
        if most >= asked.infinity:
            found.add(self._bad(bits, magnitudes, start))
        else:
            found.largest = max(found.largest, most)
        self._count(self._always, asked.always, least, most, num)
        if part:
            part = num if part >= num else part - part % asked.lanes
            found.num_part += part
            self._count(self._in_part, asked.in_part, least, most, part)
        if least == 0 and found.smallest != 1:  # nothing lies between 0 and the pattern 1
            least = self._smallest_above_zero(whole)
        if 0 < least < asked.infinity and (found.smallest < 0 or least < found.smallest):
            found.smallest = least

    def tally(self) -> Tally:
        """Return what was counted in all chunks so far."""
        asked, found = self._asked, self._found
        found.at_most = dict(zip(asked.always, self._always, strict=True))
        found.at_most_in_part = dict(zip(asked.in_part, self._in_part, strict=True))
        return found

    def _bad(self, bits: Tensor, magnitudes: Tensor, start: int) -> Tally:
        bad = magnitudes >= self._asked.infinity
        return Tally(
            largest=int(magnitudes.masked_fill(bad, -1).amax()),
            posinf=int((bits == self._asked.infinity).sum()),
            first_bad=start + int(bad.to(torch.uint8).argmax()),
        )

    def _count(
        self, counts: list[int], thresholds: tuple[int, ...], least: int, most: int, num: int
    ) -> None:
        for place, threshold in enumerate(thresholds):
            if most <= threshold:
                counts[place] += num
            elif least <= threshold:
                rare = threshold == 0 and num > _FEW
                counts[place] += self._zeros(num) if rare else self._at_most(threshold, num)

    def _at_most(self, threshold: int, num: int) -> int:
        asked, count = self._asked, 0
        num_words = -(-num // asked.lanes)
        whole = num_words * asked.lanes
        torch.clamp(self._magnitudes[:whole], threshold, threshold + 1, out=self._spare[:whole])
        for first in range(0, num_words, _SUMMED_WORDS):
            words = self._words[first : min(first + _SUMMED_WORDS, num_words)]
            below = (threshold + 1) * asked.ones * words.numel() - int(words.sum())
            for shift in asked.shifts:
                count += below >> shift & asked.lane
        return count

    def _zeros(self, num: int) -> int:
        """Return how many magnitudes are zero.

        The rows that hold one are found without writing, and alone counted.
        """
        in_rows = num - num % _ROW
        rows = self._magnitudes[:in_rows].view(-1, _ROW)
        # NumPy from here on: its short calls do not hand the interpreter to the other threads.
        holding = rows.amin(1).numpy() == 0
        if holding.sum() > len(rows) // _ROWS_WITH_ZEROS:
            return self._at_most(0, num)
        held = rows.numpy()[holding]
        rest = self._magnitudes[in_rows:num].numpy()
        return int((held == 0).sum() + (rest == 0).sum())

    def _smallest_above_zero(self, whole: int) -> int:
        """Return the smallest magnitude but zero, above every number where there is none."""
        less_one = torch.sub(self._magnitudes[:whole], 1, out=self._spare[:whole])
        # zero has become -1, and without its sign the largest
        return int(less_one.bitwise_and_(self._asked.largest).amin()) + 1


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is counted in values of one format.

    ``always`` what is rare in weights, ``in_part`` what is not.

    ``kind``: the integers behind them, ``lanes`` to a 64-bit word; ``shifts`` and ``lane`` take a
    word apart, ``ones`` is a word with 1 in each lane.
    """

    kind: torch.dtype
    largest: int
    infinity: int
    always: tuple[int, ...]
    in_part: tuple[int, ...]
    lanes: int
    shifts: tuple[int, ...]
    lane: int
    ones: int


@cache
def _asked(source: torch.dtype, stored: torch.dtype) -> _Asked:
    kind, infinity = _INTEGERS[source.itemsize], _infinity(source)
    always = {0, infinity - 1, infinity, *(cast(source, target).finite for target in TARGETS)}
    in_part = {_last_subnormal(source, stored)}
    for target in TARGETS:
        edges = cast(source, target)
        in_part |= {edges.zero, edges.subnormal}
    if (
        torch.finfo(stored).tiny < _RARE
    ):  # then next to no chunk has one, and counting costs nothing
        always.add(_last_subnormal(source, stored))
    width = 8 * kind.itemsize
    shifts = tuple(range(0, 64, width))
    return _Asked(
        kind=kind,
        largest=torch.iinfo(kind).max,
        infinity=infinity,
        always=tuple(sorted(always)),
        in_part=tuple(sorted(in_part - always)),
        lanes=len(shifts),
        shifts=shifts,
        lane=2**width - 1,
        ones=sum(1 << shift for shift in shifts),
    )


def _value(dtype: torch.dtype, pattern: int) -> float:
    if pattern < 0:
        return 0.0
    return float(torch.tensor(pattern, dtype=_INTEGERS[dtype.itemsize]).view(dtype))


@cache
def _last(dtype: torch.dtype, bound: float, *, below: bool = False) -> int:
    """Return the pattern of the largest number of ``dtype`` up to ``bound`` (or below it)."""
    nearest = torch.tensor(bound, dtype=torch.float64).to(dtype)
    pattern, value = int(nearest.view(_INTEGERS[dtype.itemsize])), float(nearest)
    return pattern - 1 if value > bound or (below and value == bound) else pattern


@cache
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
        subnormal=subnormal_count(found, stored)[0],
        first_bad=place_of(found.first_bad, shape) if found.first_bad is not None else None,
        name=name,
    )


def subnormal_count(found: Tally, stored: torch.dtype) -> tuple[int, bool]:
    """Return how many values are subnormal in the tensor's own format, and whether all of them
    were counted.
    """
    if not found.num:
        return 0, True
    count, exact = _counted(found, _last_subnormal(_source(stored), stored))
    return max(count - found.at_most[0], 0), exact


def fits_of(found: Tally, stored: torch.dtype) -> tuple[FormatFit, ...]:
    """Return what casting the tensor to each narrow format would do, from the tally of all its
    values.
    """
    return tuple(_fit(found, _source(stored), target) for target in TARGETS) if found.num else ()


def _fit(found: Tally, source: torch.dtype, target: torch.dtype) -> FormatFit:
    edges, none = cast(source, target), found.at_most[0]
    zero, exact_zero = _counted(found, edges.zero)
    small, exact_small = _counted(found, edges.subnormal)
    absmax = _value(source, found.largest)
    return FormatFit(
        format=format_name(target),
        headroom_bits=math.log2(format_limit(target) / absmax) if absmax else math.inf,
        overflow=found.at_most[_infinity(source) - 1] - found.at_most[edges.finite],
        subnormal=max(small - zero, 0),
        zero=max(zero - none, 0),
        exact=exact_zero and exact_small,
    )


def _counted(found: Tally, threshold: int) -> tuple[int, bool]:
    """Return how many magnitudes are not above ``threshold``, and whether that was counted in
    all or in a part.
    """
    if threshold in found.at_most:
        return found.at_most[threshold], True
    if found.smallest < 0 or found.smallest > threshold:
        return found.at_most[0], True  # known of all values, whatever the part holds
    share = found.at_most_in_part[threshold] / found.num_part
    return round(share * found.num), found.num_part == found.num


def _source(stored: torch.dtype) -> torch.dtype:
    source = computed_in(stored)
    if source is None:
        raise TypeError(f"{stored} is not a floating-point format")
    return source
