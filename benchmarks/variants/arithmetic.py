"""Quotients, roots and powers in other words."""

from __future__ import annotations

import ast
from collections.abc import Callable

from variants.script import Rewrite, Script, called, each_expression, expression

_NUMBERS = ((0.5, "sqrt"), (-0.5, "rsqrt"), (2, "square"))


def _quotient(template: str, *, left: bool, right: bool) -> Callable[[Script], ast.Module | None]:
    """Return a rewrite of every quotient whose operands are, or are not, tensors."""

    def apply(script: Script) -> ast.Module | None:
        def change(node: ast.expr) -> ast.expr | None:
            if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
                return None
            tensors = script.of_tensors(node)
            if (left and not tensors[0]) or tensors[1] != right:
                return None
            return expression(template, node, LEFT=node.left, RIGHT=node.right)

        return each_expression(script.tree(), change)

    return apply


def _power(templates: dict[str, str]) -> Callable[[Script], ast.Module | None]:
    """Return a rewrite of roots and squares, by the name of what they compute."""

    def apply(script: Script) -> ast.Module | None:
        def change(node: ast.expr) -> ast.expr | None:
            name, operand = _computes(node, script)
            if name not in templates or operand is None:
                return None
            made = expression(templates[name], node, OF=operand)
            return None if ast.dump(made) == ast.dump(node) else made

        return each_expression(script.tree(), change)

    return apply


def _computes(node: ast.expr, script: Script) -> tuple[str, ast.expr | None]:
    """Return which of sqrt, rsqrt and square of what an expression is, however it is spelled."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and script.of_tensors(node)[0]:
        return _named_by(node.right), node.left
    if not isinstance(node, ast.Call) or node.keywords:
        return "", None
    if called(node) in ("torch.sqrt", "torch.rsqrt", "torch.square") and len(node.args) == 1:
        return called(node).removeprefix("torch."), node.args[0]
    if isinstance(node.func, ast.Attribute):
        if node.func.attr in ("sqrt", "rsqrt", "square") and not node.args:
            return node.func.attr, node.func.value
        if node.func.attr == "pow" and len(node.args) == 1:
            return _named_by(node.args[0]), node.func.value
    return "", None


def _named_by(exponent: ast.expr) -> str:
    try:
        value = ast.literal_eval(exponent)
    except ValueError:
        return ""
    return next((name for number, name in _NUMBERS if value == number), "")


REWRITES = (
    Rewrite(
        "quotient-by-reciprocal", _quotient("LEFT * RIGHT.reciprocal()", left=False, right=True)
    ),
    Rewrite("quotient-by-power", _quotient("LEFT * RIGHT.pow(-1.0)", left=False, right=True)),
    Rewrite("quotient-by-torch", _quotient("torch.div(LEFT, RIGHT)", left=True, right=True)),
    Rewrite("quotient-by-a-number", _quotient("LEFT * (1 / RIGHT)", left=True, right=False)),
    Rewrite(
        "roots-as-powers",
        _power({"sqrt": "OF ** 0.5", "rsqrt": "OF ** -0.5", "square": "OF ** 2"}),
    ),
    Rewrite(
        "roots-as-functions",
        _power(
            {"sqrt": "torch.sqrt(OF)", "rsqrt": "torch.rsqrt(OF)", "square": "torch.square(OF)"}
        ),
    ),
    Rewrite(
        "roots-as-methods",
        _power({"sqrt": "OF.sqrt()", "rsqrt": "OF.sqrt().reciprocal()", "square": "OF.pow(2)"}),
    ),
)
