"""Numbers that a running line computes of its variables alone: a number of the program that an
operation was given is known by what it is spelled as, and by what its variables hold.

Asked of failures only: the source is read. Nothing of the script's is called.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from inspect import CO_OPTIMIZED, getattr_static
from types import FrameType
from typing import Any, Literal

from nanstop.records import LineNumber
from nanstop.rewrite.source import nodes_around
from nanstop.tracing.source.assignments import tree_of

Number = int | float
NumberPlace = Literal["divisor", "factor", "addend"]

_OPERATORS = {"divisor": ast.Div, "factor": ast.Mult, "addend": ast.Add}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def zeros_of_line(frame: FrameType, place: NumberPlace) -> tuple[LineNumber, ...]:
    """Return the numbers that are 0 and that the running line of a frame divides by, multiplies
    with or adds: each computed of variables that hold numbers. Reads no tensor.
    """
    tree = tree_of(frame.f_code.co_filename)
    if tree is None:
        return ()
    held = _Variables(frame)
    found = {}
    for node in _placed(tree, frame.f_lineno, place):
        of: dict[str, Number] = {}
        value = held.value(node, of)
        if value is not None and value == 0 and of:
            text, of = _as_given(tree, frame, node, held) or (ast.unparse(node), of)
            said = tuple((name, float(number)) for name, number in of.items())
            found[ast.unparse(node)] = LineNumber(text=text, value=0.0, of=said)
    return tuple(found.values())


def _as_given(
    tree: ast.AST, frame: FrameType, node: ast.expr, held: _Variables
) -> tuple[str, dict[str, Number]] | None:
    """Return the assignment of a local variable that is 0, with what its variables hold, where it
    is the only one and still comes to 0; None of anything else.
    """
    code = frame.f_code
    if not isinstance(node, ast.Name) or node.id not in code.co_varnames[code.co_argcount :]:
        return None
    functions = nodes_around(tree, frame.f_lineno, ast.FunctionDef, ast.AsyncFunctionDef)
    inner = max(functions, key=lambda one: one.lineno, default=None)
    names = [one for one in ast.walk(inner) if isinstance(one, ast.Name)] if inner else []
    given = [one for one in names if one.id == node.id and isinstance(one.ctx, ast.Store)]
    statements = nodes_around(tree, given[0].lineno, ast.Assign) if len(given) == 1 else []
    made = max(statements, key=lambda one: one.lineno, default=None)
    if not isinstance(made, ast.Assign) or made.targets != given:
        return None
    of: dict[str, Number] = {}
    return (ast.unparse(made), of) if held.value(made.value, of) == 0 and of else None


def zeros_handed_on(
    frame: FrameType, called: Iterable[FrameType], place: NumberPlace
) -> tuple[LineNumber, ...]:
    """Return the numbers that are 0 and that the running line of a frame hands to a function which
    divides by them, multiplies with them or adds them. ``called``: the frames in between, the
    innermost first; the first of which the line has such a number is that function's.
    """
    for inner in called:
        code = inner.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        names = [one.text for one in zeros_of_line(inner, place)]
        if names:
            handed = [_handed(frame, inner, name) for name in names if name in arguments]
            return tuple(one for one in handed if one is not None)
    return ()


def _handed(frame: FrameType, inner: FrameType, name: str) -> LineNumber | None:
    """Return what the one call of a function in a running line gives as the argument of a name; in
    its place only where the function is no method, which is given its object before.
    """
    tree, code, line = tree_of(frame.f_code.co_filename), inner.f_code, frame.f_lineno
    around = [] if tree is None else nodes_around(tree, line, ast.stmt)
    if not around:
        return None
    calls = [
        node
        for node in _expressions(max(around, key=lambda node: node.lineno))
        if isinstance(node, ast.Call) and _last_name(node.func) == code.co_name
    ]
    if len(calls) != 1:
        return None
    given = [word.value for word in calls[0].keywords if word.arg == name]
    if not given and getattr(inner.f_globals.get(code.co_name), "__code__", None) is code:
        given = calls[0].args[: code.co_argcount][code.co_varnames.index(name) :][:1]
    of: dict[str, Number] = {}
    if not given or _Variables(frame).value(given[0], of) != 0 or not of:
        return None
    said = tuple((variable, float(number)) for variable, number in of.items())
    return LineNumber(text=ast.unparse(given[0]), value=0.0, of=said)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _placed(tree: ast.AST, line: int, place: NumberPlace) -> Iterator[ast.expr]:
    """Yield what stands in a place in the statement that runs, without the bodies of a compound
    one.
    """
    around = nodes_around(tree, line, ast.stmt)
    if not around:
        return
    inner = max(around, key=lambda node: node.lineno)
    kind = _OPERATORS[place]
    for node in _expressions(inner):
        if not isinstance(node, ast.BinOp | ast.AugAssign) or not isinstance(node.op, kind):
            continue
        if not node.lineno <= line <= (node.end_lineno or line):
            continue
        yield node.value if isinstance(node, ast.AugAssign) else node.right
        if isinstance(node, ast.BinOp) and place != "divisor":
            yield node.left


def _expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement and the expressions in it."""
    queue: list[ast.AST] = [statement]
    while queue:
        node = queue.pop()
        yield node
        queue.extend(n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.stmt))


class _Variables:
    """What the variables of a frame hold."""

    def __init__(self, frame: FrameType) -> None:
        self._known = frame.f_globals | frame.f_locals
        if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
            frame.f_locals.clear()  # a copy that the frame keeps would hold the graph (PEP 667)

    def value(self, node: ast.expr, of: dict[str, Number]) -> Number | None:
        """Return the number that an expression is, None where it is none; ``of`` takes what its
        variables hold.
        """
        if isinstance(node, ast.Constant):
            return _number(node.value)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _SIGNS:
            inner = self.value(node.operand, of)
            return None if inner is None else _SIGNS[type(node.op)](inner)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self.value(node.left, of), self.value(node.right, of)
            if left is None or right is None:
                return None
            with suppress(ArithmeticError):
                return _ARITHMETIC[type(node.op)](left, right)
            return None
        found = _number(self._held(node))
        if found is not None:
            of[ast.unparse(node)] = found
        return found

    def _held(self, node: ast.expr) -> Any:
        """Return what a variable, an attribute or an entry holds, None where it is not known
        without a call.
        """
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._held(node.value)
            return None if owner is None else getattr_static(owner, node.attr, None)
        if isinstance(node, ast.Subscript):
            owner, key = self._held(node.value), node.slice
            at = key.value if isinstance(key, ast.Constant) else self._held(key)
            if type(owner) in (dict, list, tuple) and type(at) in (int, str):
                with suppress(LookupError, TypeError):
                    return owner[at]
        return None


def _number(value: Any) -> Number | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None
