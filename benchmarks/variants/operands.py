"""Which operands of ``/``, ``**`` and ``@`` are tensors: a script that notes it while it runs."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from variants.script import Place, Script, at_top, each_expression, expression, place

FILE = "operands.jsonl"
"""Beneath the folder that the script runs in: a line for each expression it came by."""

_NOTE = f"""
def noted_(where, operator, left, right, seen={{}}):
    import json, torch
    both = [isinstance(one, torch.Tensor) for one in (left, right)]
    if where not in seen:
        seen[where] = both
        with open({FILE!r}, "a") as file:
            file.write(json.dumps([where, both]) + "\\n")
    if operator == "/":
        return left / right
    return left ** right if operator == "**" else left @ right
"""
_SIGNS = {ast.Div: "/", ast.Pow: "**", ast.MatMult: "@"}


def noting(source: str) -> str | None:
    """Return a script that also notes its operands, or None if it has no such operator."""

    def change(node: ast.expr) -> ast.expr | None:
        if not isinstance(node, ast.BinOp) or type(node.op) not in _SIGNS:
            return None
        words = ast.Constant(value=places[id(node)]), ast.Constant(value=_SIGNS[type(node.op)])
        return expression(
            "noted_(WHERE, SIGN, LEFT, RIGHT)",
            node,
            WHERE=words[0],
            SIGN=words[1],
            LEFT=node.left,
            RIGHT=node.right,
        )

    tree = Script(source).tree()
    places = {
        id(node): " ".join(map(str, place(node)))
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp)
    }
    if each_expression(tree, change) is None:
        return None
    at_top(tree, _NOTE)
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def noted(folder: Path) -> dict[Place, tuple[bool, bool]]:
    """Return what a script of ``noting`` left in the folder in which it ran."""
    path = folder / FILE
    found: dict[Place, tuple[bool, bool]] = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        where, (left, right) = json.loads(line)
        first, column, last, end = map(int, where.split())
        found[(first, column, last, end)] = (left, right)
    return found
