"""Logarithms of functions that leave their range: hyperbolic ones, a normal's tail, i0."""

from __future__ import annotations

import math

from nanstop.rewrite.draft import Draft
from nanstop.rewrite.operations import Operation


def log_cosh(draft: Draft, found: Operation) -> str:
    x = draft.again(found.operand, "away")
    return f"{x} + {draft.functional('softplus')}(-2 * {x}) - {math.log(2)!r}"


def log_softplus(draft: Draft, found: Operation) -> str | None:
    """Log of softplus(x), which is exp(x) far below 0."""
    if len(found.args) > 1 or found.keywords:
        return None
    x = draft.again(found.operand, "raw")
    near = f"{draft.torch('log')}({draft.functional('softplus')}({x}.clamp(min=-20)))"
    return f"{draft.torch('where')}({x} < -20, {x}, {near})"


def log_expm1(draft: Draft, found: Operation) -> str:
    x = draft.again(found.operand, "grown")
    return f"{x} + {draft.torch('log')}(-{draft.torch('expm1')}(-{x}))"


def log_i0(draft: Draft, found: Operation) -> str:
    x = draft.again(found.operand, "grown")
    return f"{draft.torch('log')}({draft.torch('special')}.i0e({x})) + {x}.abs()"


def log_erfc(draft: Draft, found: Operation) -> str:
    return log_tail(draft, found, "-")


def log_tail(draft: Draft, found: Operation, sign: str = "") -> str:
    """Log of 1 + erf(x), and of 1 - erf(x), by the tail of a normal distribution."""
    tail = f"{draft.torch('special')}.log_ndtr"
    root = math.sqrt(2)
    return f"{math.log(2)!r} + {tail}({sign}{root!r} * {draft.closed(found.operand)})"


def log_floored(draft: Draft, log: str, floor: float) -> str:
    """Log of a number, of which ``log`` is the logarithm, plus ``floor``."""
    least = math.log(floor)
    there, back = ("+", "-") if least < 0 else ("-", "+")
    softplus = draft.functional("softplus")
    return f"{softplus}({log} {there} {abs(least):.7g}) {back} {abs(least):.7g}"
