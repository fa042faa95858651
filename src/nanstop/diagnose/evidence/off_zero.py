"""What to type where a function has no value at 0 and no run tells which value is meant: the number
is kept from 0 where it is made.
"""

from __future__ import annotations

from nanstop.diagnose.evidence.descent import Operand

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


def kept_from_zero(read: Operand, *, is_nan: bool = False) -> str:
    """Return what is usually typed for what an operation reads and is 0; ``is_nan``: it made NaN of
    that, 0 / 0.
    """
    if is_nan:
        return _OF_BOTH
    return _OF_MODEL if read.is_a("parameter") else _OF_DATA
