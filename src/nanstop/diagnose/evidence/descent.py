"""What the first bad operation read, by descent: the divisor that is a count, the argument that was
a probability. What is decided here never rests on a name.
"""

from __future__ import annotations

from nanstop.frozen import frozen
from nanstop.records import Change, OpEvent, TensorStats
from nanstop.records.line_forms import BETWEEN_POLES
from nanstop.records.values import entry_of
from nanstop.records.vocabulary import Descent
from nanstop.wording import number

CONTRACTIONS = ("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "addbmm", "mul")
"""Operations by which weights weigh values; a product by hand is summed afterwards."""
_OF_POSITIVE = ("sqrt", "rsqrt", "log", "log2", "log10")
_BATCH_NORMS = ("native_batch_norm", "_native_batch_norm_legit_no_training")
_WITHIN_ONE = ("acos", "asin", "atanh")
MODEST_EXPONENT = 8.0
"""An argument of which every exponential fits in float16."""

_OF_BATCH = {"data", "ids"}
"""What is made of the batch, by descent."""
_OF_DATA = (
    "It is 0 by the data, or by a schedule, alone: leave such samples or steps out where they are "
    "made, or keep it from 0 by a number of the size that matters: `x.clamp(min=1e-3)`"
)
_OF_MODEL = (
    "Keep it above 0 where it is made, before all that reads it: `F.softplus(x) + 1e-6` in place "
    "of `relu(x)`, or `x.clamp(min=1e-6)`; what data makes 0 (`log(y / x)`) needs its own bound"
)
_OF_BOTH = (
    "0 / 0 may have a limit: `x = torch.where(x.abs() < 1e-4, 1e-4, x)` before all that reads x "
    "comes near to it, and `torch.sinc(x / math.pi)` is sin(x) / x"
)

_OF_EMPTY = (
    "begin with other values (`nn.init.normal_(weight, std=1e-3)`), or add a small number to the "
    "divisor"
)
_OF_LEARNED = "learn its logarithm, or take `F.softplus` of it"


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


def reads_weights_alone(event: OpEvent) -> bool:
    """Return whether all that an op reads is made of parameters, and nothing of it of the batch."""
    kinds = [set(one) for one in event.descent]
    return bool(kinds) and all("parameter" in one and not one & _OF_BATCH for one in kinds)


def read_alone(event: OpEvent) -> tuple[str, ...]:
    """Return the weights that an op reads, where it reads nothing but weights."""
    if not reads_weights_alone(event):
        return ()
    return tuple(entry_of(one.name) for one in event.inputs if one.name)


def of_weights(event: OpEvent) -> tuple[str, ...]:
    """Return which weight is 0 throughout where an op that reads weights alone divides by what is
    made of it, or which one is learned below 0 where the op has no value; and what is done then.
    """
    named = [one for one in event.inputs if one.name and one.finite]
    if not named or not reads_weights_alone(event):
        return ()
    empty = [one for one in named if one.shape and not one.absmax]
    if empty and zero_divisor(event) is not None:
        name = entry_of(empty[0].name or "")
        return (f"`{name}` is 0 throughout: {_OF_EMPTY}",)
    if is_below_0(event) and any(one.nan for one in event.outputs):
        name = entry_of(named[0].name or "")
        return (f"`{name}` is learned, and nothing keeps it above 0: {_OF_LEARNED}",)
    return ()


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


CLAMPED_EXPONENT = (
    "Clamp the *argument* of exp where the objective allows it: there is no gradient beyond the "
    "bound."
)
"""What is usually typed where an exponential is infinite."""


def kept_from_zero(read: Operand, *, is_nan: bool = False) -> str:
    """Return what is usually typed for what an operation reads and is 0; ``is_nan``: it made NaN of
    that, 0 / 0.
    """
    if is_nan:
        return _OF_BOTH
    return _OF_MODEL if read.is_a("parameter") else _OF_DATA


def outside_of(event: OpEvent) -> str:
    """Return which numbers a function of one number was given that have no value, "" where they
    are not known.
    """
    read, least = event.inputs[0] if event.inputs else None, _least(event)
    if read is None:
        return ""
    if event.name in _OF_POSITIVE and least < 0.0:
        return f"the `{event.name}` of negative numbers, down to {number(least)}"
    if event.name == "log1p" and least < -1.0:
        return f"the `log1p` of numbers below -1, down to {number(least)}"
    if event.name == "pow" and least < 0.0:
        return f"negative numbers, down to {number(least)}, to a power that is not whole"
    if event.name in _WITHIN_ONE and read.absmax > 1.0:
        beyond = number(read.absmax - 1)
        return f"the `{event.name}` of numbers beyond 1 in magnitude, by up to {beyond}"
    return _variance_below_0(event)


def at_pole(event: OpEvent) -> str:
    """Return which end of its domain a function was given that is infinite there, "" for none."""
    name, read = event.name.removeprefix("special_"), event.inputs[0] if event.inputs else None
    ends = BETWEEN_POLES.get(name)
    if ends is None or read is None or read.absmax != 1.0:
        return ""
    if ends[0] < 0:
        return f"the `{name}` of 1 or -1, where it is infinite"
    return f"the `{name}` of 1, where it is infinite"


def _variance_below_0(event: OpEvent) -> str:
    """Return which variance, that it is given and does not measure, a batch norm takes the root of
    though it lies below 0 by more than its eps; "" for none.

    What it measures itself is a result of its own, beside what it normalises.
    """
    measured = any(0 not in one.shape for one in event.outputs[1:])
    if event.name not in _BATCH_NORMS or measured or not event.scalars:
        return ""
    given, eps = event.inputs[-1], event.scalars[-1]
    if given.minimum is None or given.minimum + eps >= 0.0:
        return ""
    name = (given.name or "").removeprefix("buffer ")
    below = f"a variance below 0, down to {number(given.minimum)}"
    return f"{below}, in `{name}`" if name else below


def is_below_0(event: OpEvent) -> bool:
    """Return whether a function that has a value from 0 on was given negative numbers."""
    return _least(event) < 0.0 and event.name in (*_OF_POSITIVE, "pow")


def _least(event: OpEvent) -> float:
    """Return the least number that an operation reads first, 0 where that is not known."""
    return (event.inputs[0].minimum if event.inputs else None) or 0.0
