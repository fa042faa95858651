"""A number that is a little off 0 wherever it is read from a line on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nanstop.records.line_forms import OFF_ZERO
from nanstop.rewrite.draft import Draft
from nanstop.rewrite.operations import Operation, constant_of, operation
from nanstop.rewrite.source import Edit, expressions_of

_BY = repr(next(iter(OFF_ZERO.values()))).replace("e-0", "e-")
_ZERO_ALIKE = ("pow", "square", "sqrt", "abs", "neg")
"""Operations of one number that are 0 where that is, and only there."""


def rewrite_off_zero(draft: Draft, op: str) -> bool:
    """Return whether what the statement divides by could be named a little off 0, there and behind
    it; the draft holds it.
    """
    names = {_root(draft, one) for one in _named(draft, op or "div")}
    name = names.pop() if len(names) == 1 else None
    if name is None:
        return False
    scope, start = draft.source.scope_of(draft.statement), draft.source.span(draft.statement)[0]
    read = [
        node
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and node.id == name and draft.source.span(node)[0] >= start
    ]
    if any(not isinstance(node.ctx, ast.Load) for node in read):
        return False  # it is another number from there on
    chosen = draft.source.fresh(f"{name}_off_zero")
    by = "1e-3" if draft.dtype in ("float16", "bfloat16") else _BY
    draft.lines.append(f"{chosen} = {name}.masked_fill({name} == 0, {by})")
    draft.edits += [Edit(*draft.source.span(node), chosen) for node in read]
    return True


def _named(draft: Draft, op: str) -> Iterator[Operation]:
    for root in expressions_of(draft.statement):
        for node in ast.walk(root):
            found = operation(draft.source, node)
            if found is not None and found.name == op:
                yield found


def _root(draft: Draft, found: Operation) -> str | None:
    """Return the name that a divisor, or what else has to be off 0, is 0 because of."""
    node = found.args[-1] if found.name in ("div", "xlogy") else found.operand
    while not isinstance(node, ast.Name):
        inner = operation(draft.source, node)
        if inner is None:
            return None
        if inner.name in _ZERO_ALIKE:
            node = inner.operand
            continue
        others = [one for one in inner.args if constant_of(draft.source, one) is None]
        if inner.name != "mul" or len(others) != 1:
            return None
        node = others[0]
    return node.id
