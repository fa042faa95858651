"""What is typed for a line in float32: a cast of what an operation of it reads, and a block without
autocast where that would round it again.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nanstop.records.formats import HALF
from nanstop.records.line_forms import UNCAST
from nanstop.rewrite.draft import Draft, NotKnownError, is_simple
from nanstop.rewrite.operations import CASTS, Operation, is_cheap, number_of
from nanstop.rewrite.source import Edit, is_closed

_PRODUCTS = frozenset({"matmul", "mm", "bmm", "dot", "mv", "addmm", "einsum", "linear"})
"""Each of which torch may compute by another; their operands have to be of one format."""

_STEP = "    "


def rewrite_in_float32(draft: Draft, op: str) -> bool:
    """Return whether the operation that is called ``op`` could be rewritten; the draft holds it.

    Where it stands within one of that name, the inner one makes the other wide as well.
    """
    return _is_widened(draft, _read_by(draft, op))


def rewrite_each_read(draft: Draft) -> bool:
    """Return whether an operation of the statement reads something that has a name; the draft holds
    casts of all that do, but for numbers.
    """
    return _is_widened(draft, _each_read(draft))


def rewrite_and_back(draft: Draft, op: str) -> bool:
    """Return whether that could be done at ``op``, or where it is "" at all that is read, with the
    result in the format of what was read; the draft holds it. Errors: ``NotKnownError`` where the
    statement is of no value.
    """
    read = _read_by(draft, op) if op else _each_read(draft)
    of = next((draft.source.segment(node) for node in read if is_cheap(node)), None)
    value = getattr(draft.statement, "value", None)
    if of is None or not isinstance(value, ast.expr):
        raise NotKnownError
    start, end = draft.source.span(value)
    before, after = ("", "") if is_closed(value) else ("(", ")")
    draft.edits.append(Edit(start, start, before))
    is_widened = _is_widened(draft, read)
    draft.edits.append(Edit(end, end, f"{after}.to({of}.dtype)"))
    return is_widened


def _read_by(draft: Draft, op: str) -> list[ast.expr]:
    meant = _PRODUCTS if op in _PRODUCTS else {op}
    named = [one for one in draft.operations() if one.name in meant]
    nodes = {id(one.node) for one in named}
    inner = [one for one in named if not any(id(n) in nodes for n in _below(one.node))]
    found: list[ast.expr] = []
    for one in inner:
        read = [node for node in one.args if number_of(node) is None and not _is_text(node)]
        found += read if op in _PRODUCTS else read[:1]
    return found


def _each_read(draft: Draft) -> list[ast.expr]:
    read = (node for one in draft.operations() for node in one.args)
    named = (node for node in read if isinstance(node, ast.Name | ast.Attribute))
    found = (one for one in named if draft.source.is_value(one) and not _is_number(draft, one))
    return list(dict.fromkeys(found))


def _is_number(draft: Draft, node: ast.expr) -> bool:
    """Return whether what has a name is made by no call but of Python's ``math`` where the file
    binds it: an eps, a scale.
    """
    source = draft.source
    bound = source.stored.get(ast.unparse(node), []) if isinstance(node, ast.Attribute) else []
    made = [getattr(source.parents[one], "value", None) for one in bound]
    values = [one for one in (*made, draft.meant(node)) if isinstance(one, ast.expr)]
    values = [one for one in values if one is not node]
    calls = (n for value in values for n in ast.walk(value) if isinstance(n, ast.Call))
    return bool(values) and all(source.qualified(n.func).startswith("math.") for n in calls)


def _is_widened(draft: Draft, read: list[ast.expr]) -> bool:
    draft.edits += dict.fromkeys(_widened(draft, node) for node in read)
    return bool(read)


def rewrite_uncast(draft: Draft) -> bool:
    """Return whether the statement casts to half precision; the draft holds casts to float32."""
    for one in draft.operations():
        if one.name in CASTS and one.is_method and all(map(_may_be_half, one.args[1:])):
            draft.edits.append(_cast_instead(draft, one))
    return bool(draft.edits)


def _cast_instead(draft: Draft, one: Operation) -> Edit:
    _, start = draft.source.span(one.operand)
    close = draft.source.text.index(".", start)
    parent = draft.source.parents[one.node]
    is_wide = isinstance(parent, ast.Attribute) and parent.attr == "float"
    return Edit(close, draft.source.span(one.node)[1], "" if is_wide else ".float()")


def _may_be_half(given: ast.expr) -> bool:
    """Return whether an argument of a cast names a format of half precision, or that of another
    tensor.
    """
    named = given.attr if isinstance(given, ast.Attribute) else ""
    return named in ("dtype", "half", *HALF)


def rewrite_out_of_autocast(draft: Draft, op: str) -> bool:
    """Return whether that could be done in a block without autocast; the draft holds it. Errors:
    ``NotKnownError`` where the statement can have no block, or its device is not known.
    """
    if not (rewrite_uncast(draft) if op == UNCAST else rewrite_in_float32(draft, op)):
        return False
    source, statement = draft.source, draft.statement
    indent = source.indent_of(statement)
    texts = (ast.Constant, ast.JoinedStr)
    in_lines = any(isinstance(n, texts) and n.lineno != n.end_lineno for n in ast.walk(statement))
    if indent is None or in_lines or not draft.device or not is_simple(statement):
        raise NotKnownError
    block = f'with {draft.torch("autocast")}("{draft.device}", enabled=False):'
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    start = source.position(first, 0)
    header = f"{indent}{block}{source.newline(first)}{_STEP}"
    deeper = (source.position(line, 0) for line in range(first + 1, last + 1))
    draft.edits += [Edit(start, start, header), *(Edit(at, at, _STEP) for at in deeper)]
    return True


def _widened(draft: Draft, node: ast.expr) -> Edit:
    start, end = draft.source.span(node)
    if draft.is_wrapped(node):
        close = draft.source.text.index(")", end) + 1
        return Edit(close, close, ".float()")
    return Edit(start, end, f"{draft.closed(node)}.float()")


def _below(node: ast.AST) -> Iterator[ast.AST]:
    return (one for one in ast.walk(node) if one is not node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
