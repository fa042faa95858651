"""Memory that an operation takes, or leaves in its result, without writing it: zeros there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from nanstop.rewrite.draft import Draft
from nanstop.rewrite.operations import Operation, is_cheap, operation
from nanstop.rewrite.source import expressions_of

_ZEROS = {"empty": "zeros", "empty_like": "zeros_like", "new_empty": "new_zeros"}


def rewrite_unwritten(draft: Draft) -> bool:
    """Return whether something of the statement could be rewritten; the draft holds it."""
    done = False
    nodes = [node for root in expressions_of(draft.statement) for node in ast.walk(root)]
    for found in (operation(draft.source, node) for node in nodes):
        text = _FORMS[found.name](draft, found) if found and found.name in _FORMS else None
        if found is not None and text is not None:
            draft.replaced(found.node, text)
            done = True
    return done


def _zeros(draft: Draft, found: Operation) -> str | None:
    node = found.node
    if not isinstance(node, ast.Call) or found.made_by is not None:
        return None
    text, zeros = draft.source.segment(node), _ZEROS.get(found.name)
    if zeros is None:
        return f"{text}.zero_()"
    start, function = draft.source.span(node)[0], draft.source.segment(node.func)
    rest = draft.source.text[start + len(function) : draft.source.span(node)[1]]
    if isinstance(node.func, ast.Attribute):
        return f"{function.removesuffix(node.func.attr)}{zeros}{rest}"
    return f"{draft.torch(zeros)}{rest}"


def _grouped(draft: Draft, found: Operation) -> str | None:
    """Return the product of the rows that belong to a group, and rows of zeros behind it."""
    offsets = found.argument(2, "offs")
    if offsets is None or found.made_by is not None:
        return None
    rows = draft.twice(found.operand, "rows")
    ends = draft.source.operand(offsets)
    num = draft.named(f"int({ends}[-1])", "num_written", offsets)
    kept = rows if is_cheap(found.operand) or rows.isidentifier() else f"({rows})"
    product = draft.with_operand(found, 0, f"{kept}[:{num}]")
    return f"{draft.functional('pad')}({product}, (0, 0, 0, len({rows}) - {num}))"


_FORMS: Mapping[str, Callable[[Draft, Operation], str | None]] = {
    **dict.fromkeys((*_ZEROS, "empty_strided", "empty_permuted"), _zeros),
    **dict.fromkeys(("grouped_mm", "_grouped_mm"), _grouped),
}
