"""Where the expression stands that a frame evaluates, and how the source spells its operands."""

from __future__ import annotations

import ast
from itertools import islice
from types import CodeType
from typing import Any

Span = tuple[tuple[int | None, int | None], tuple[int | None, int | None]]
"""Lines from 1, and columns in bytes, of the beginning and of the end."""


def span_at(code: CodeType, instruction: int) -> Span | None:
    """Return where the expression begins and ends that code evaluates at an instruction (-1: not
    known); None where Python does not know it (before 3.11).
    """
    places: Any = getattr(code, "co_positions", None)
    if places is None or instruction < 0:
        return None
    line, last, column, end = next(islice(places(), instruction // 2, None))
    return (line, column), (last, end)


def span_of(node: ast.expr) -> Span:
    """Return where an expression begins and ends."""
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def spelled(tree: ast.AST, span: Span, number: int) -> tuple[str, ...]:
    """Return, of the operation at a place that is given ``number`` operands, the names and
    attributes that it spells as these, "" for any other; () where there is none that does.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and span_of(node) == span:
            operands = _operands(node, number)
            named = [isinstance(one, ast.Name | ast.Attribute) for one in operands]
            return tuple(ast.unparse(o) if n else "" for o, n in zip(operands, named, strict=True))
    return ()


def _operands(node: ast.expr, number: int) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    if not isinstance(node, ast.Call):
        return []
    if isinstance(node.func, ast.Attribute) and len(node.args) < number:
        return [node.func.value, *node.args]
    return node.args
