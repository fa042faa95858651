"""Backward slices of a trace: from the values that failed to the ops where the failure was born.

What counts is the value that reaches a failing loss, gradient or weight. A mask of -inf, a NaN in a
branch that ``where`` leaves out, an overflow that nothing reads: none of them is on such a path,
and none is reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from nanstop.frozen import frozen
from nanstop.numerics.tensors import format_name
from nanstop.records import FailureKind, Phase, TensorStats, op_name
from nanstop.tracing.operators import FILLS, NAN_DROPS
from nanstop.tracing.recorder import Op, Trace, Value

_MADE_LATE: tuple[Phase, ...] = ("backward", "optimizer", "recompute")


@frozen
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
    def kind(self) -> FailureKind:
        """Of a range that is bad."""
        if self.has_nan:
            return "nan"
        return "+inf" if self.high == math.inf else "-inf"

    @property
    def absmax(self) -> float:
        return max(abs(self.low), abs(self.high))


def range_of(trace: Trace, value: Value) -> Range:
    """Return the light range of a value; an unmeasured one counts as finite zero."""
    if value.slot < 0:
        return Range(0.0, 0.0)
    return Range(trace.low[value.slot], trace.high[value.slot])


def light_stats(value: Value, seen: Range) -> TensorStats:
    """Return what is known of a value by its light range alone."""
    finite = [abs(edge) for edge in (seen.low, seen.high) if math.isfinite(edge)]
    return TensorStats(
        shape=value.shape,
        dtype=format_name(value.dtype),
        nan=int(seen.has_nan),
        posinf=int(seen.high == math.inf),
        neginf=int(seen.low == -math.inf),
        absmax=max(finite, default=0.0),
        name=value.storage.name,
    )


@frozen
class Births:
    """Where bad values began. ``nan``/``inf``: op indices;
    ``external``: (first reader, value) written by no op; ``path``: the ops by which bad values
    came from there to where they were looked for.
    """

    nan: tuple[int, ...]
    inf: tuple[int, ...]
    external: tuple[tuple[int, Value], ...]
    path: tuple[int, ...] = ()

    def alone_are(self, others: Births) -> bool:
        """Return whether the same ops are all that bad values come of here."""
        same = (self.nan, self.inf) == (others.nan, others.inf) != ((), ())
        return same and not self.external


def trace_back(trace: Trace, sinks: Iterable[Value]) -> Births:
    """Return the births of the bad values that the sinks hold.

    NaN is followed along NaN first: an op whose output holds NaN while no input does gave birth to
    it, and the infinities that it read are followed further. List (foreach) ops are followed within
    their lane.
    """
    queue: deque[tuple[int, int | None]] = deque()
    nan: set[int] = set()
    inf: set[int] = set()
    external: dict[int, tuple[int, Value]] = {}
    for sink in sinks:
        found = list(bad_writers(trace, sink))
        queue.extend(found)
        if not found:
            external.setdefault(id(sink.storage), (len(trace.ops), sink))
    seen: set[tuple[int, int | None]] = set()
    while queue:
        index, lane = queue.popleft()
        if (index, lane) in seen:
            continue
        seen.add((index, lane))
        op = trace.ops[index]
        poisoned = [v for v in _lane(op.inputs, lane) if carries(trace, v)]
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
        tuple(sorted({index for index, _ in seen})),
    )


def carries(trace: Trace, value: Value) -> bool:
    """Return whether an operand brings a bad value in.
    A nameless number that no op made is the program's own.
    """
    number = not value.shape and value.storage.name is None and not value.storage.writers
    return range_of(trace, value).is_bad and not number


def _lane(values: Iterable[Value], lane: int | None) -> Iterator[Value]:
    return (v for v in values if lane is None or v.lane is None or v.lane == lane)


def bad_writers(trace: Trace, value: Value) -> Iterator[tuple[int, int | None]]:
    """Yield (op index, lane) of the writes that can have put the bad value there, newest first.

    Writes to another part of the storage are passed over;
    one that covers all that the value reads ends the search.
    """
    for index, output in _seen_writes(trace, value):
        if output is not None and (output.slot < 0 or range_of(trace, output).is_bad):
            yield index, output.lane


def read_late(trace: Trace, births: Births) -> frozenset[int]:
    """Return those of the infinities that were made after the forward pass, that stand at a line
    whose own derivative is not bad, or that a bad derivative of another line reads.
    """
    ops = trace.ops
    late = [i for i in (*births.inf, *births.nan) if ops[i].phase in _MADE_LATE]
    bad = {i: [v for v in ops[i].inputs if carries(trace, v)] for i in late}
    read = {i: trace_back(trace, values).inf for i, values in bad.items()}
    lines = {ops[i].line for i in late}

    def is_read(index: int) -> bool:
        return any(index in read[i] and ops[i].line != ops[index].line for i in late)

    return frozenset(
        i
        for i in births.inf
        if ops[i].phase in _MADE_LATE or ops[i].line not in lines or is_read(i)
    )


def with_dropped(trace: Trace, births: Births) -> Births:
    """Return births together with those of NaN that was left out on the way to one of them.

    The mean of what is not NaN is 0/0 where all is NaN:
    the division gave birth, the NaN before it is the cause.
    """
    starts = [value for index in births.nan for value in trace.ops[index].inputs]
    dropping = [i for i in reaching(trace, starts) if op_name(trace.ops[i].name) in NAN_DROPS]
    if not dropping:
        return births
    left_out = trace_back(trace, [v for i in dropping for v in trace.ops[i].inputs])
    return Births(
        tuple(sorted({*births.nan, *left_out.nan})),
        tuple(sorted({*births.inf, *left_out.inf})),
        tuple(sorted((*births.external, *left_out.external), key=lambda pair: pair[0])),
        tuple(sorted({*births.path, *left_out.path})),
    )


def reaching(trace: Trace, sinks: Iterable[Value]) -> frozenset[int]:
    """Return the indices of every op that the sinks depend on."""
    queue: deque[int] = deque()
    for sink in sinks:
        queue.extend(writers(trace, sink))
    seen: set[int] = set()
    while queue:
        index = queue.popleft()
        if index in seen:
            continue
        seen.add(index)
        for value in trace.ops[index].inputs:
            queue.extend(writers(trace, value))
    return frozenset(seen)


def writers(trace: Trace, value: Value) -> Iterator[int]:
    """Yield the indices of the ops that wrote the elements of a value, newest first."""
    yield from dict.fromkeys(index for index, _ in _seen_writes(trace, value))


def _seen_writes(trace: Trace, value: Value) -> Iterator[tuple[int, Value | None]]:
    """Yield (op index, what it wrote) of the writes that the value can show, newest first;
    None: ids or a mask.
    """
    for index in reversed(value.storage.writers[: value.generation]):
        written = [o for o in trace.ops[index].outputs if o.storage is value.storage]
        if not written:
            yield index, None
        shown = [output for output in written if not _is_apart(output, value)]
        for output in shown:
            yield index, output
        if any(_hides(output, value) for output in shown):
            return


def _is_apart(written: Value, read: Value) -> bool:
    """Return whether the two lie in different parts of their storage."""
    if written.covers or written.dtype != read.dtype:
        return False
    (first, end), (start, last) = _span(written), _span(read)
    return end <= start or last <= first


def _hides(written: Value, read: Value) -> bool:
    """Return whether nothing older can be seen by ``read`` after ``written``."""
    if written.covers:
        return True
    if written.dtype != read.dtype:
        return False
    if (written.layout, written.shape) == (read.layout, read.shape):
        return True
    (first, end), (start, last) = _span(written), _span(read)
    return end - first == math.prod(written.shape) and first <= start and last <= end


def _span(value: Value) -> tuple[int, int]:
    """Return the first element of the storage that a value lies on, and the one after its last."""
    strides, offset = value.layout
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True))
    return offset, offset + reach + 1


def absorbed_births(trace: Trace, live: frozenset[int]) -> tuple[int, ...]:
    """Return the ops that bore infinities which an op on the way to the sinks, one of ``live``,
    turned finite again.
    """
    found: set[int] = set()
    for op in (trace.ops[index] for index in live):
        if op.phase not in ("forward", "loss") or any(
            range_of(trace, o).is_bad for o in op.outputs
        ):
            continue
        infinite = [v for v in op.inputs if range_of(trace, v).has_inf]
        found |= set(trace_back(trace, infinite).inf if infinite else ())
    return tuple(sorted(index for index in found if not is_placed(trace.ops[index])))


def is_placed(op: Op) -> bool:
    """Return whether an op writes an infinity that the program names:
    a fill, or a fill of a mask.
    """
    return op_name(op.name) in FILLS and not any(math.isnan(number) for number in op.scalars)
