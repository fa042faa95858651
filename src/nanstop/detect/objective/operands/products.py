"""The product with a weight that a value comes of."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanstop.localize.slicing import writers
from nanstop.records import op_kind

if TYPE_CHECKING:
    from nanstop.tracing.recorder import Trace, Value

MOST_BETWEEN = 16
"""Operations between a product and what is read of it: a sigmoid by hand has three."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "linear"})


def product(trace: Trace, value: Value) -> int | None:
    """Return the product with a weight that each number of a value comes of."""
    for _ in range(MOST_BETWEEN):
        newest = next(iter(writers(trace, value)), None)
        if newest is None or op_kind(trace.ops[newest].name) in PRODUCTS:
            return newest
        value = max(trace.ops[newest].inputs, key=lambda one: math.prod(one.shape), default=value)
    return None
