"""Numbers that are not finite and that a line of a script writes down itself: `float("-inf")`,
`math.nan`, `1e999`. What a line only brings in was computed before it, where no operation is seen.

Asked of failures only: the source is read.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Mapping
from typing import Any

from nanstop.records import SourceLine
from nanstop.rewrite.source import nodes_around
from nanstop.tracing.holders import tree_of


def writes_down(line: SourceLine, *, is_nan: bool) -> bool:
    """Return whether the statement of a line, or the lambda in it, holds NaN, or else an infinity,
    by its own text: a constant, or one that a module has under a name that the file imports.
    """
    tree = tree_of(line.file)
    code = [] if tree is None else nodes_around(tree, line.line, ast.stmt, ast.Lambda)
    if tree is None or not code:
        return False
    imported = _imported(tree)
    held = ast.walk(min(code, key=_length))
    numbers = (value for node in held if (value := _number(node, imported)) is not None)
    return any(math.isnan(value) if is_nan else math.isinf(value) for value in numbers)


def _length(node: ast.stmt | ast.expr) -> tuple[int, int]:
    return (node.end_lineno or 0) - node.lineno, isinstance(node, ast.stmt)


def _imported(tree: ast.AST) -> Mapping[str, Any]:
    """Return what the imports of a file gave names to, as far as it is imported by now."""
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                module = one.name if one.asname else one.name.partition(".")[0]
                found[one.asname or module] = sys.modules.get(module)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            held = vars(sys.modules[node.module]) if node.module in sys.modules else {}
            found |= {one.asname or one.name: held.get(one.name) for one in node.names}
    return found


def _number(node: ast.AST, imported: Mapping[str, Any]) -> float | None:
    """Return the number that an expression is without a variable of the script, None where it is
    none.
    """
    value: Any = None
    if isinstance(node, ast.Constant):
        value = node.value
    elif isinstance(node, ast.Name):
        value = imported.get(node.id)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        module = imported.get(node.value.id)
        value = getattr(module, "__dict__", {}).get(node.attr)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 1:
        value = _parsed(node.args[0]) if node.func.id == "float" else None
    return value if isinstance(value, float) else None


def _parsed(node: ast.AST) -> float | None:
    text = node.value if isinstance(node, ast.Constant) else None
    try:
        return float(text) if isinstance(text, str) else None
    except ValueError:
        return None
