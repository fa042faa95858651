"""Memory that nobody writes and somebody reads: what another tensor has left there is NaN today, a
large number tomorrow, and 0 in most steps.

Found by experiment: the step is run with NaN in all memory that it takes and has not written yet.
"""

from __future__ import annotations

from contextlib import suppress

from nanstop.errors import ShortOfMemoryError
from nanstop.localize import slicing
from nanstop.localize.localize import localize, sinks
from nanstop.records import Localization, OpEvent, Phase
from nanstop.replay.conditions import filled_memory
from nanstop.replay.rerun import attempt
from nanstop.replay.step import Step
from nanstop.tracing.record_step import record


def of_unwritten(
    step: Step, micro: int, found: Localization | None, phase: Phase = "forward"
) -> Localization | None:
    """Return where a micro-batch reads what nobody has written, if its failure, which is ``found``,
    may come of that, or with None any; None if there is no such place, or memory is short. Runs it
    once, undone, and where something else is bad a few times more. Synchronises the device.
    """
    if found is not None and found.first_bad is None:
        return None
    with suppress(ShortOfMemoryError):
        return _in_filled(step, micro, found, phase)
    return None


def unwritten_read(step: Step, micro: int) -> Localization | None:
    """Return where a healthy micro-batch reads what nobody has written, and its loss or gradients
    come of it; None if it does not. Runs it once, undone. Synchronises the device.
    """
    if not attempt(step, micro, under=filled_memory).bad:
        return None
    return of_unwritten(step, micro, None)


def _in_filled(
    step: Step, micro: int, found: Localization | None, phase: Phase
) -> Localization | None:
    event = found.first_bad if found is not None else None
    with filled_memory():
        recording = record(step, micro, phase=phase)
        births = slicing.trace_back(recording.trace, sinks(recording))
        bad = (*births.inf, *births.nan, *(index for index, _ in births.external))
        earliest = min(bad, default=None)
        if earliest is None or (event is not None and not _may_come_of(event, earliest)):
            return None
        other = localize(step, micro, phase=phase)
    of_memory = other is not None and other.first_bad is not None and other.first_bad.unwritten
    return other if of_memory else None


def _may_come_of(event: OpEvent, earliest: int) -> bool:
    """Return whether what fails may come of what is bad first in filled memory: it is before it, or
    is bad in some runs alone.
    """
    comes_and_goes = all(stats.finite for stats in event.outputs)
    return earliest < event.index or (earliest == event.index and comes_and_goes)
