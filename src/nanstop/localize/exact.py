"""Whether a failing operation has a value where all that it goes back to is computed in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from nanstop.localize.dataflow import exploded_number, rounded_to_zero
from nanstop.localize.origin import FailureOrigin
from nanstop.localize.slicing import reaching
from nanstop.records import Finiteness, Localization
from nanstop.tracing.in_float64 import InFloat64
from nanstop.tracing.op_patches import Look

_MOST_NUMBERS = 2**24
"""Numbers that are held in both formats: 128 MiB of float64."""
_IN_FORWARD = ("forward", "evaluate", "generate", "loss")


def with_exact(
    found: Localization, origin: FailureOrigin, look_again: Callable[[Look], object]
) -> Localization:
    """Return a localization with what float64 makes of it, and with the operation that has rounded
    its divisor to 0 where float64 has a value; of an overflow, with the exponential before it.

    ``look_again`` has a look see every op of one more run. Asked of an operation of the forward
    that has no value in a wider format for what it reads.
    """
    event = found.first_bad
    if event is not None and event.wider == "finite" and event.phase in _IN_FORWARD:
        large = exploded_number(origin.trace, event.index)
        return replace(found, exploded=origin.event(large) if large is not None else None)
    if event is None or event.wider != "nonfinite" or event.phase not in _IN_FORWARD:
        return found
    outcome = _outcome(origin, event.index, look_again)
    rounded, divisor = found.vanished, origin.divisor(event)
    if rounded is None and outcome == "finite" and divisor is not None:
        index = rounded_to_zero(origin.trace, divisor)
        rounded = origin.event(index) if index is not None else None
    return replace(found, in_float64=outcome, vanished=rounded)


def _outcome(origin: FailureOrigin, index: int, look_again: Callable[[Look], object]) -> Finiteness:
    ops = origin.trace.ops
    before = reaching(origin.trace, ops[index].inputs)
    made = (value for place in before for value in (*ops[place].inputs, *ops[place].outputs))
    if sum(math.prod(value.shape) for value in made) > _MOST_NUMBERS:
        return "unknown"
    look = InFloat64(before, index)
    look_again(look)
    return look.outcome
