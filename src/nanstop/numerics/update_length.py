"""How far an update may move a weight, beside what float32 makes of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

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


def held_against(
    in_float32: Mapping[str, float],
    named: Mapping[str, Tensor],
    groups: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """Return the lengths that those of an update are held against: its own ``in_float32``, and for
    a parameter that hardly moves there a tenth of the way that others of its group go.

    A gradient that is 0 but for rounding (of what is added to every key of a softmax) is another
    one in each format; an optimizer that divides by its size makes an ordinary step of it, and one
    of next to nothing where its eps is more. ``groups``: of the optimizer.
    """
    roots = {name: math.sqrt(max(1, named[name].numel())) for name in in_float32}
    place = {id(one): number for number, group in enumerate(groups) for one in group["params"]}
    of = {name: place.get(id(named[name]), -1) for name in in_float32}
    farthest: dict[int, float] = {}
    for name, length in in_float32.items():
        if math.isfinite(length):
            farthest[of[name]] = max(length / roots[name], farthest.get(of[name], 0.0))
    return {
        name: max(length, roots[name] * farthest[of[name]] / TOO_LONG)
        if math.isfinite(length)
        else length
        for name, length in in_float32.items()
    }
