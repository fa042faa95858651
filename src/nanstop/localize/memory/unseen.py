"""Bad values that no operation writes: a kernel of Triton or CUDA launched by hand, an extension in
C++, NumPy.

What is known of such a write is found by experiment: memory that was filled with ones is not finite
after one line of Python; what that line can read is finite; with ordinary numbers in its place
(between 0.25 and 0.75) the memory stays finite. What is bad whatever the line reads may just as
well be a number that the script puts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from nanstop.localize.memory.write_watch import HiddenWrite, WriteWatch
from nanstop.localize.origin import FailureOrigin
from nanstop.localize.slicing import range_of, writers
from nanstop.records import Localization, OpEvent, Unwritten
from nanstop.tracing.op_patches import Filled
from nanstop.tracing.operators import takes_memory
from nanstop.tracing.places import source_line
from nanstop.tracing.recorder import Value
from nanstop.tracing.source.written import writes_down

LookAgain = Callable[..., tuple[tuple[str, ...], Exception | None]]

_UNSEEN_KERNEL = (
    "the memory that it takes is written by a kernel that torch does not dispatch (Triton, CUDA)"
)


def written_unseen(
    found: Localization, origin: FailureOrigin, look_again: LookAgain
) -> tuple[Localization, tuple[Value, ...]]:
    """Return ``found`` with what is known of a write that no operation makes, and the bad values
    that were there to be read by it: where the failure goes back to.

    ``look_again`` has looks see every op of one more run.
    """
    event = found.first_bad
    if event is None or not found.reaches:
        return found, ()
    takes = takes_memory(event.op)
    if takes:
        if not _fails_filled(found, event, look_again):
            return replace(found, first_bad=replace(event, unwritten=Unwritten())), ()
        # What stood there when it was taken is what another tensor has left.
        found = replace(
            found,
            origin="unknown",
            positions=None,
            first_bad=replace(event, outputs=(), unwritten=None),
            blind_spots=(*found.blind_spots, _UNSEEN_KERNEL),
        )
    elif found.origin != "unknown":
        return found, ()
    taken = event.index if takes else next(_left_finite(origin, event), None)
    if taken is None:
        return found, ()
    write = _watched(look_again, WriteWatch(taken)).found
    if write is None:
        return found, ()
    again = _watched(look_again, WriteWatch(taken, at=write.at)).found
    if again is None or again.line != write.line:
        return found, ()
    found = replace(found, first_bad=_event(origin, taken, again))
    return _with_outcome(found, again, taken, look_again), tuple(_bad_read(origin, again))


def _fails_filled(found: Localization, event: OpEvent, look_again: LookAgain) -> bool:
    """Return whether the failure stays, be the memory filled with ones or with zeros."""
    return all(_fails_with(number, found, event, look_again) for number in (1.0, 0.0))


def _fails_with(number: float, found: Localization, event: OpEvent, look_again: LookAgain) -> bool:
    failed, error = look_again(Filled(event.index, number))
    return error is not None if found.reaches[0] == "exception" else found.reaches[0] in failed


def _left_finite(origin: FailureOrigin, event: OpEvent) -> Iterator[int]:
    """Yield the operations that wrote last, finite, what an operation reads and is bad by then."""
    trace = origin.trace
    read = [value for value in trace.ops[event.index].inputs if value.slot >= 0]
    pairs = zip(read, event.inputs, strict=False) if len(read) == len(event.inputs) else ()
    for value, stats in pairs:
        if not stats.finite:
            yield from list(writers(trace, value))[:1]


def _watched(look_again: LookAgain, watch: WriteWatch) -> WriteWatch:
    try:
        look_again(watch)
    finally:
        watch.end()
    return watch


def _event(origin: FailureOrigin, taken: int, write: HiddenWrite) -> OpEvent:
    """Return what took the memory as an event of the line that writes it."""
    return replace(
        origin.event(taken),
        source=source_line(write.line),
        inputs=write.read,
        outputs=write.written,
        wider="unknown",
        reference="unknown",
        legal=None,
        descent=(),
    )


def _with_outcome(
    found: Localization, write: HiddenWrite, taken: int, look_again: LookAgain
) -> Localization:
    line, outcome = source_line(write.line), "nonfinite"
    is_nan = any(stats.nan for stats in write.written)
    if line is None or not writes_down(line, is_nan=is_nan):
        outcome = _watched(look_again, WriteWatch(taken, at=write.at, ordinary=True)).outcome
    return replace(found, unseen_write=outcome)


def _bad_read(origin: FailureOrigin, write: HiddenWrite) -> Iterator[Value]:
    trace = origin.trace
    for stats, writer in zip(write.read, write.writers, strict=True):
        if stats.finite or writer is None:
            continue
        for value in trace.ops[writer].outputs:
            if value.slot < 0 or range_of(trace, value).is_bad:
                yield value
