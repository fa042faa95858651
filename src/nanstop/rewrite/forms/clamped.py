"""Operations of numbers that are kept where they have a value, and a derivative, by a clamp."""

from __future__ import annotations

import ast

from nanstop.records.formats import least_number, margin, most_exponent
from nanstop.records.line_forms import BETWEEN_POLES
from nanstop.rewrite.draft import Draft
from nanstop.rewrite.operations import Operation, is_cheap, number_of
from nanstop.rewrite.source import Edit

_SPACING = {"float16": "1e-3", "bfloat16": "8e-3", "float64": "2.3e-16"}
"""A number that is each format's spacing at 1 once it is taken away from 1 there."""
_LEAST_OF_ROOT = 1e-12
"""What a root is usually taken of at least: of what is 0 it is near 0 still, and its derivative far
from the end of any format but float16.
"""


def clamped(draft: Draft, found: Operation) -> str:
    """Raised to the smallest number: the gradient at 0 is 0."""
    bound = _bound(draft, found)
    text = f"{draft.source.operand(_under(found.operand, bound))}.clamp({bound})"
    return draft.with_operand(found, 0, text)


def _bound(draft: Draft, found: Operation) -> str:
    """Return the smallest number that is kept: 1 of a count, which is 0 or 1 at least; of an
    exponent the largest. Both are those of the format, or usual ones, as that of a root is where
    nothing that it is taken of but 0 is smaller.
    """
    if found.name == "exp":
        return f"max={most_exponent(draft.dtype):g}" if draft.bounded else f"max={draft.most()}"
    if draft.counted:
        return "min=1"
    if draft.bounded:
        return f"min={_number(least_number(draft.dtype))}"
    if is_root(found) and draft.dtype != "float16" and draft.least >= _LEAST_OF_ROOT:
        return f"min={_number(_LEAST_OF_ROOT)}"
    of = draft.source.segment(found.operand) if is_cheap(found.operand) else ""
    return f"min={draft.tiny(of)}"


def is_root(found: Operation) -> bool:
    """Return whether an operation is a square root, as a power it may be."""
    exponent = number_of(found.argument(1, "exponent"))
    return found.name == "sqrt" or (found.name == "pow" and exponent == 0.5)


def _number(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e")


def clamp(draft: Draft, found: Operation) -> tuple[Edit, Edit]:
    """Return what is put around an operand, whose own text others may change."""
    bound = _bound(draft, found)
    operand = _under(found.operand, bound)
    (start, end), (_, last) = draft.source.span(operand), draft.source.span(found.operand)
    is_closed = draft.source.operand(operand) == draft.source.segment(operand)
    before, after = ("", "") if is_closed else ("(", ")")
    return Edit(start, start, before), Edit(end, last, f"{after}.clamp({bound})")


def _under(node: ast.expr, bound: str) -> ast.expr:
    """Return what a method keeps from 0 on, or from below on, where a ``bound`` above 0 takes its
    place; else the node.
    """
    func = node.func if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or not isinstance(func, ast.Attribute):
        return node
    given = (*node.args, *(one.value for one in node.keywords if one.arg == "min"))
    least = number_of(given[0]) if len(given) == 1 else None
    is_alone = len(node.args) + len(node.keywords) == 1 and least is not None and least <= 0.0
    is_floor = func.attr in ("clamp", "clip", "clamp_min") and is_alone
    return func.value if is_floor and bound.startswith("min=") else node


def log_of_more(draft: Draft, found: Operation) -> str:
    """Kept off -1: the gradient there is 0."""
    edge = _SPACING.get(draft.dtype, "1.2e-7")
    operand = draft.source.operand(found.operand)
    return draft.with_operand(found, 0, f"{operand}.clamp(min=-1 + {edge})")


def edged(draft: Draft, found: Operation) -> str:
    """Kept off -1 and 1, or off 0 and 1, where its derivative is infinite."""
    edge = _number(margin(draft.dtype)) if draft.bounded else _SPACING.get(draft.dtype, "1.2e-7")
    low, high = BETWEEN_POLES.get(found.name, (-1, 1))
    operand = draft.source.operand(_unclamped(found.operand, low, high))
    least = f"{low} + {edge}" if low else edge
    return draft.with_operand(found, 0, f"{operand}.clamp({least}, {high} - {edge})")


def _unclamped(node: ast.expr, low: float, high: float) -> ast.expr:
    """Return what a method keeps between two numbers, or others farther apart; else the node."""
    func = node.func if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or not isinstance(func, ast.Attribute):
        return node
    named = {one.arg: one.value for one in node.keywords}
    ends = [number_of(one) for one in (*node.args, *map(named.get, ("min", "max")))]
    least, most = (*(end for end in ends if end is not None), None, None)[:2]
    is_wide = least is not None and most is not None and least <= low and most >= high
    is_one = func.attr in ("clamp", "clip") and len(node.args) + len(node.keywords) == 2
    return func.value if is_wide and is_one else node


def above_one(draft: Draft, found: Operation) -> str:
    """Kept above 1: the derivative there is infinite."""
    edge = _SPACING.get(draft.dtype, "1.2e-7")
    operand = draft.source.operand(found.operand)
    return draft.with_operand(found, 0, f"{operand}.clamp(min=1 + {edge})")
