"""A fill with the farthest number of its format in the place of one beyond it."""

from __future__ import annotations

import ast

from nanstop.rewrite.draft import Draft
from nanstop.rewrite.guarded import with_operand
from nanstop.rewrite.operations import is_cheap, number_of, operation
from nanstop.rewrite.source import expressions_of


def rewrite_held(draft: Draft) -> bool:
    """Return whether a fill of the statement could be rewritten; the draft holds it."""
    done = False
    nodes = [node for root in expressions_of(draft.statement) for node in ast.walk(root)]
    for found in (operation(draft.source, node) for node in nodes):
        given = found.argument(2, "value") if found is not None else None
        number = number_of(given)
        if found is None or found.name != "masked_fill" or number is None:
            continue
        value = draft.twice(found.operand, "filled")
        end = "min" if number < 0 else "max"
        text = draft.source.segment(found.node)
        if not is_cheap(found.operand):
            text = with_operand(draft, found, 0, value)
        assert given is not None
        old = draft.source.segment(given)
        head, _, tail = text.rpartition(old)
        number_text = f"{draft.torch('finfo')}({value}.dtype).{end}"
        draft.replaced(found.node, f"{head}{number_text}{tail}")
        done = True
    return done
