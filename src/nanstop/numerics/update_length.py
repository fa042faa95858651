"""How far an update may move a weight, beside what float32 makes of it."""

from __future__ import annotations

import math

TOO_LONG = 10.0
"""Times its length in float32 from which an update is ruinous.

A step of nearest rounding moves a weight by twice what it should at most, rounded moments lengthen it by less than half
again, and a walk of the ten first updates that turns at each of them by at most 2 x sqrt(10) = 6.3.
"""


def is_ruinous(length: float, in_float32: float) -> bool:
    """Return whether an update of this length is none that float32 would make; where float32 fails too, if it fails."""
    if not math.isfinite(in_float32):
        return not math.isfinite(length)
    return not length <= TOO_LONG * in_float32
