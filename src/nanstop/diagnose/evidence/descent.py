"""What the first bad operation read, by descent: the divisor that is a count, the argument that was
a probability. What is decided here never rests on a name.
"""

from __future__ import annotations

from nanstop.frozen import frozen
from nanstop.records import Change, OpEvent, TensorStats
from nanstop.records.vocabulary import Descent

CONTRACTIONS = ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "mul")
"""Operations by which weights weigh values; a product by hand is summed afterwards."""
MODEST_EXPONENT = 8.0
"""An argument of which every exponential fits in float16."""


@frozen
class Operand:
    """An input of an operation: its place, its range, and what it is by descent."""

    place: int
    stats: TensorStats
    kinds: frozenset[Descent]

    def is_a(self, *kinds: Descent) -> bool:
        """Return whether it is one of these."""
        return not self.kinds.isdisjoint(kinds)

    @property
    def is_constant(self) -> bool:
        """Whether it comes from no parameter, state or batch: a number of the program's own."""
        return "constant" in self.kinds


def operand(event: OpEvent, place: int) -> Operand | None:
    """Return an input of an op, None where it has none at this place."""
    if not 0 <= place < len(event.inputs):
        return None
    kinds = event.descent[place] if place < len(event.descent) else ()
    return Operand(place, event.inputs[place], frozenset(kinds))


def zero_divisor(event: OpEvent) -> Operand | None:
    """Return what the op divides by, if it holds zeros."""
    if event.divisor is None:
        return None
    read = operand(event, event.divisor)
    return read if read is not None and read.stats.zeros else None


def without_zeros(event: OpEvent) -> Change | None:
    """Return the change after which an op that divides by zeros divides by ones there."""
    divisor = zero_divisor(event)
    return Change(kind="raise_zeros", operand=divisor.place) if divisor is not None else None
