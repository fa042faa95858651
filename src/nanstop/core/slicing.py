"""Backward slices of a trace: from the values that failed to the ops where the failure was born.

What counts is the value that reaches a failing loss, gradient or weight. A mask of -inf, a NaN in a branch that
``where`` leaves out, an overflow that nothing reads: none of them is on such a path, and none is reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nanstop.core.optable import CONSTANTS, base_name
from nanstop.core.trace import Op, Trace, Value


@dataclass(frozen=True, slots=True)
class Range:
    """Light range of a value: extremes, and which kinds of non-finite value it holds."""

    low: float
    high: float

    @property
    def has_nan(self) -> bool:
        return math.isnan(self.low)

    @property
    def has_inf(self) -> bool:
        return math.isinf(self.low) or math.isinf(self.high)

    @property
    def is_bad(self) -> bool:
        return self.has_nan or self.has_inf

    @property
    def absmax(self) -> float:
        return max(abs(self.low), abs(self.high))


def range_of(trace: Trace, value: Value) -> Range:
    """Return the light range of a value; an unmeasured one counts as finite zero."""
    if value.slot < 0:
        return Range(0.0, 0.0)
    return Range(trace.low[value.slot], trace.high[value.slot])


@dataclass(frozen=True, slots=True)
class Births:
    """Where bad values began. ``nan``/``inf``: op indices; ``external``: (first reader, value) written by no op."""

    nan: tuple[int, ...]
    inf: tuple[int, ...]
    external: tuple[tuple[int, Value], ...]
    visited: frozenset[int]


def trace_back(trace: Trace, sinks: Iterable[Value]) -> Births:
    """Return the births of the bad values that the sinks hold.

    NaN is followed along NaN first: an op whose output holds NaN while no input does gave birth to it, and the
    infinities that it read are followed further. List (foreach) ops are followed within their lane.
    """
    queue: deque[tuple[int, int | None]] = deque()
    nan: set[int] = set()
    inf: set[int] = set()
    external: dict[int, tuple[int, Value]] = {}
    for sink in sinks:
        queue.extend(bad_writers(trace, sink))
        if not bad_writer_known(trace, sink):
            external.setdefault(id(sink.storage), (len(trace.ops), sink))
    seen: set[tuple[int, int | None]] = set()
    while queue:
        index, lane = queue.popleft()
        if (index, lane) in seen:
            continue
        seen.add((index, lane))
        op = trace.ops[index]
        poisoned = [value for value in _lane(op.inputs, lane) if range_of(trace, value).is_bad]
        makes_nan = op.raised or any(
            range_of(trace, value).has_nan for value in _lane(op.outputs, lane)
        )
        nans = [value for value in poisoned if range_of(trace, value).has_nan]
        if makes_nan and not nans:
            nan.add(index)
        elif not poisoned:
            inf.add(index)
        for value in nans or poisoned:
            found = list(bad_writers(trace, value))
            queue.extend(found)
            if not found:
                known = external.get(id(value.storage))
                if known is None or index < known[0]:
                    external[id(value.storage)] = (index, value)
    return Births(
        tuple(sorted(nan)),
        tuple(sorted(inf)),
        tuple(sorted(external.values(), key=lambda pair: pair[0])),
        frozenset(index for index, _ in seen),
    )


def _lane(values: Iterable[Value], lane: int | None) -> Iterator[Value]:
    return (v for v in values if lane is None or v.lane is None or v.lane == lane)


def bad_writers(trace: Trace, value: Value) -> Iterator[tuple[int, int | None]]:
    """Yield (op index, lane) of the writes that can have put the bad value there, newest first.

    Writes to a part of the storage leave older ones visible; one that covers it ends the search.
    """
    for index in reversed(value.storage.writers[: value.generation]):
        for output in trace.ops[index].outputs:
            if output.storage is not value.storage:
                continue
            if output.slot < 0 or range_of(trace, output).is_bad:
                yield index, output.lane
            if output.covers:
                return


def bad_writer_known(trace: Trace, value: Value) -> bool:
    """Return whether any recorded op can have written the bad value."""
    return next(bad_writers(trace, value), None) is not None


def reaching(trace: Trace, sinks: Iterable[Value]) -> frozenset[int]:
    """Return the indices of every op that the sinks depend on."""
    queue: deque[int] = deque()
    for sink in sinks:
        queue.extend(_writers(trace, sink))
    seen: set[int] = set()
    while queue:
        index = queue.popleft()
        if index in seen:
            continue
        seen.add(index)
        for value in trace.ops[index].inputs:
            queue.extend(_writers(trace, value))
    return frozenset(seen)


def _writers(trace: Trace, value: Value) -> Iterator[int]:
    for index in reversed(value.storage.writers[: value.generation]):
        yield index
        if any(o.storage is value.storage and o.covers for o in trace.ops[index].outputs):
            return


@dataclass(frozen=True, slots=True)
class Absorption:
    """An infinity that an op (``absorber``) turned into finite numbers, and where the infinity was born."""

    birth: int
    absorber: int


def absorptions(trace: Trace, live: frozenset[int]) -> tuple[Absorption, ...]:
    """Return infinities that disappeared on the way to the sinks, births first. ``live``: ops that reach the sinks."""
    found: dict[int, Absorption] = {}
    for index in sorted(live):
        op = trace.ops[index]
        if op.phase not in ("forward", "loss") or any(
            range_of(trace, o).is_bad for o in op.outputs
        ):
            continue
        infinite = [v for v in op.inputs if range_of(trace, v).has_inf]
        for birth in trace_back(trace, infinite).inf if infinite else ():
            if not is_constant(trace.ops[birth]):
                found.setdefault(birth, Absorption(birth, index))
    return tuple(found[birth] for birth in sorted(found))


def is_constant(op: Op) -> bool:
    """Return whether an op puts infinities in place on purpose: a fill, or a fill of a mask."""
    return base_name(op.name) in CONSTANTS and (
        any(math.isinf(number) or abs(number) > 1e30 for number in op.scalars)
        or not op.inputs
        or base_name(op.name) in ("masked_fill", "masked_fill_", "where", "lift_fresh_copy")
    )


def growth_chain(
    trace: Trace, index: int, *, factor: float = 8.0, limit: int = 6
) -> tuple[int, ...]:
    """Return ops upstream of ``index``, oldest first, whose output is ``factor`` times larger than all they read.

    At each op the activation of the largest magnitude is followed; weights are not activations.
    """
    chain: list[int] = []
    seen: set[int] = set()
    current: int | None = index
    while current is not None and current not in seen and len(chain) < limit:
        seen.add(current)
        op = trace.ops[current]
        activations = [v for v in op.inputs if v.storage.name is None] or list(op.inputs)
        sized = [(range_of(trace, v).absmax, v) for v in activations]
        sized = [(size, v) for size, v in sized if math.isfinite(size)]
        largest = max(sized, key=lambda pair: pair[0], default=None)
        written = max((range_of(trace, o).absmax for o in op.outputs), default=0.0)
        if current != index and largest and written > factor * max(largest[0], 1e-30):
            chain.append(current)
        current = next(_writers(trace, largest[1]), None) if largest else None
    return tuple(reversed(chain))
