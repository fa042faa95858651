"""How far an update may move a weight, beside what float32 makes of it."""

from __future__ import annotations

import math

TOO_LONG = 10.0
"""Times its length in float32 from which an update is ruinous.

A step of nearest rounding moves a weight by twice what it should at most, rounded moments lengthen
it by less than half again, and a walk of the ten first updates that turns at each of them by at
most 2 x sqrt(10) = 6.3.
"""


def is_ruinous(length: float, in_float32: float) -> bool:
    """Return whether an update is more than ``TOO_LONG`` times as long as in float32.

    Lengths are 2-norms over the same elements. Where float32 is not finite either, only an update
    that is not finite counts.
    """
    if not math.isfinite(in_float32):
        return not math.isfinite(length)
    return not length <= TOO_LONG * in_float32
