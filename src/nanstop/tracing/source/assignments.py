"""The line of a script that gave a variable, or an attribute of one of its objects, its value.

Asked of failures only: the source is read.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType

from nanstop.frozen import frozen
from nanstop.numerics.tensors import is_in_place
from nanstop.records import SourceLine
from nanstop.rewrite.source import nodes_around

_VIEWS = {"view", "reshape", "flatten", "ravel", "squeeze", "unsqueeze", "transpose", "t", "T"}
_VIEWS |= {"mT", "select", "narrow", "diagonal", "detach", "data", "numpy", "values", "flat"}
_VIEWS |= {"loc", "iloc", "at", "iat"}
"""What writes through to the tensor, the array or the table that it is taken of."""


@frozen
class Assignment:
    """``file``, ``at``: a line in the scope in which ``variable`` was given its value.

    ``attribute``: whether it is one of ``self``. ``buffer``: and a module's buffer. ``within``: the
    attributes of a library's objects by which the variable holds what is looked for, each with the
    class of its object.
    """

    file: str
    at: int
    variable: str
    attribute: bool = False
    buffer: bool = False
    within: tuple[tuple[type, str], ...] = ()


def line_of(place: Assignment, *, is_written: bool = False) -> SourceLine | None:
    """Return the line that gave a variable its value: the last one in its scope, before the line
    that runs if there is one. Of an attribute the last one of the constructor, where no other line
    gives it one; or, where that does not or ``is_written``, the only one that has written to it
    since.
    """
    tree = tree_of(place.file)
    found = [] if tree is None else list(bindings(tree, place))
    if tree is None or not found:
        return None
    if place.attribute:
        later = [line for line in found if function_at(tree, line) != "__init__"]
        is_later = is_written or len(later) == len(found)
        numbers = later if is_later else [] if later else _of_constructor(tree, place, found)
        if len(numbers) != 1:
            return None
        number = numbers[0]
    else:
        number = max([line for line in found if line <= place.at] or found)
        if _is_one_of_several(tree, number, found, place.at):
            return None
    return _source_line(place.file, tree, number)


def _of_constructor(tree: ast.AST, place: Assignment, found: list[int]) -> list[int]:
    """Return the last line that gives an attribute a value in the function in which ``place`` lies,
    or the only one of the file; none where that one of several may not have run.
    """
    around = _functions(tree, place.at)
    inner = max(around, key=lambda one: one.lineno, default=None)
    own = [n for n in found if inner is not None and inner.lineno <= n <= (inner.end_lineno or 0)]
    if len(own) > 1 and nodes_around(tree, own[-1], ast.If, ast.Try):
        return []
    return own[-1:] if own else found if len(found) == 1 else []


def _is_one_of_several(tree: ast.AST, number: int, found: list[int], at: int) -> bool:
    """Return whether another arm of an ``if`` around a line gives the value as well: which one ran
    is not known, but where line ``at``, which runs, lies in the arm of the first.
    """
    for node in nodes_around(tree, number, ast.If):
        first, *_ = node.orelse or (None,)
        start, end = (first.lineno, node.end_lineno or 0) if first is not None else (0, 0)
        is_else = start <= number <= end
        others = [n for n in found if node.lineno <= n <= (node.end_lineno or 0)]
        apart = any((start <= n <= end) != is_else for n in others)
        inside = node.lineno <= at <= (node.end_lineno or 0)
        if apart and not (inside and (start <= at <= end) == is_else):
            return True
    return False


def written_below(place: Assignment) -> SourceLine | None:
    """Return the line further down that wrote last to what a variable holds, if the loop around the
    line that runs gives it no value before that one: it did in the round before.
    """
    tree = tree_of(place.file)
    loops = nodes_around(tree, place.at, ast.For, ast.While) if tree is not None else []
    if tree is None or not loops or place.attribute:
        return None
    inner = max(loops, key=lambda node: node.lineno)
    lines = list(bindings(tree, place))
    found = [line for line in lines if inner.lineno <= line <= (inner.end_lineno or 0)]
    if not found or min(found) <= place.at or len(lines) > len(found) + 1:
        return None  # or it was written to before the loop as well
    return _source_line(place.file, tree, max(found))


def _source_line(file: str, tree: ast.AST, number: int) -> SourceLine:
    text, function = linecache.getline(file, number).strip(), function_at(tree, number)
    return SourceLine(file=file, line=number, function=function, text=text)


def is_assignment(line: SourceLine) -> bool:
    """Return whether a line is of a statement that computes what it gives to a variable."""
    tree = tree_of(line.file)
    return tree is not None and bool(nodes_around(tree, line.line, ast.Assign, ast.AnnAssign))


def function_at(tree: ast.AST, line: int) -> str:
    around = max(_functions(tree, line), key=lambda f: f.lineno, default=None)
    return around.name if around is not None else "<module>"


def _functions(tree: ast.AST, line: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions that a line lies in."""
    return nodes_around(tree, line, ast.FunctionDef, ast.AsyncFunctionDef)


def is_set_up_alone(place: Assignment) -> bool:
    """Return whether nothing but a constructor gives an attribute a value."""
    tree = tree_of(place.file)
    lines = list(bindings(tree, place)) if tree is not None else []
    return all(function_at(tree, line) == "__init__" for line in lines if tree is not None)


def is_set_later(kind: type, attribute: str) -> bool:
    """Return whether a method of a class, or of one that it is made of, gives an attribute a value
    after the constructor: the line that made the object says nothing of it then.
    """
    for one in kind.__mro__:
        file = getattr(sys.modules.get(one.__module__), "__file__", None)
        tree = tree_of(file) if file is not None and file.endswith(".py") else None
        if tree is None:
            continue
        place = Assignment(str(file), 0, attribute, attribute=True)
        bodies = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        mine = [n for n in bodies if n.name == one.__name__]
        later = (line for line in bindings(tree, place) if function_at(tree, line) != "__init__")
        if any(n.lineno <= line <= (n.end_lineno or 0) for line in later for n in mine):
            return True
    return False


def is_of_class_at(file: str, line: int, at: int) -> bool:
    """Return whether a line lies in the innermost class around line ``at`` of its file."""
    tree = tree_of(file)
    around = [] if tree is None else nodes_around(tree, at, ast.ClassDef)
    inner = max(around, key=lambda node: node.lineno, default=None)
    return inner is not None and inner.lineno <= line <= (inner.end_lineno or 0)


def is_bound(place: Assignment) -> bool:
    """Return whether the source gives a variable a value anywhere."""
    tree = tree_of(place.file)
    return tree is not None and any(bindings(tree, place))


def bound_in_loop(place: Assignment, at: int) -> bool:
    """Return whether the innermost loop around line ``at`` gives the variable a value."""
    tree = tree_of(place.file)
    loops = [] if tree is None else nodes_around(tree, at, ast.For, ast.While)
    if tree is None or not loops:
        return False
    inner = max(loops, key=lambda n: n.lineno)
    return any(inner.lineno <= line <= (inner.end_lineno or 0) for line in bindings(tree, place))


def bindings(tree: ast.AST, place: Assignment) -> Iterator[int]:
    """Yield the lines that give a variable, or elements of it, a value in the innermost scope that
    does so.
    """
    visible = {f.lineno for f in _functions(tree, place.at)} | {0}
    found: dict[int, list[int]] = {}
    for node in ast.walk(tree):
        if not _binds(node, place):
            continue
        line: int = getattr(node, "lineno", 0)
        scope = max((f.lineno for f in _functions(tree, line)), default=0)
        if place.attribute or scope in visible:
            found.setdefault(0 if place.attribute else scope, []).append(line)
    yield from sorted(found[max(found)]) if found else ()


def _held_by(target: ast.AST, variable: str) -> ast.AST:
    """Return what holds an entry that is written: x of ``x[3]["y"][0] = ...``, and of
    ``x.view(-1)[0] = ...``, where x is no attribute of that name.
    """
    while True:
        view = target.func if isinstance(target, ast.Call) else target
        if isinstance(target, ast.Subscript):
            target = target.value
        elif isinstance(view, ast.Attribute) and view.attr in _VIEWS - {variable}:
            target = view.value
        else:
            return target


def _binds(node: ast.AST, place: Assignment) -> bool:
    written = _written_by_call(node)
    target = _held_by(written, place.variable) if written is not None else node
    if place.attribute and target is node and isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        first = node.args[0] if node.args else None
        named = isinstance(first, ast.Constant) and first.value == place.variable
        return called == "register_buffer" and named
    if isinstance(target, ast.Subscript) and isinstance(target.ctx, ast.Store):
        target = _held_by(target, place.variable)
    if target is node and not isinstance(getattr(node, "ctx", None), ast.Store):
        return False
    if place.attribute:
        return isinstance(target, ast.Attribute) and target.attr == place.variable
    return isinstance(target, ast.Name) and target.id == place.variable


def _written_by_call(node: ast.AST) -> ast.AST | None:
    """Return what a call such as ``x.lerp_(y)`` writes to."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    return node.func.value if is_in_place(node.func.attr) else None


def attributes_given(file: str) -> frozenset[str]:
    """Return the names of the attributes that a file gives a value to."""
    return _given("".join(linecache.getlines(file)))


@lru_cache(maxsize=8)
def _given(source: str) -> frozenset[str]:
    nodes = ast.walk(tree) if (tree := _parsed(source)) is not None else ()
    attributes = (one for one in nodes if isinstance(one, ast.Attribute))
    return frozenset(one.attr for one in attributes if isinstance(one.ctx, ast.Store))


def entries_put(code: CodeType) -> list[tuple[str, int]]:
    """Return the names under which a function puts entries, as `out["name"] = value` does, each
    with its line.
    """
    tree = tree_of(code.co_filename)
    last = max((n for _, _, n in code.co_lines() if n), default=0)
    nodes = ast.walk(tree) if tree is not None else ()
    return [
        (node.slice.value, node.lineno)
        for node in nodes
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.slice, ast.Constant)
        and isinstance(node.slice.value, str)
        and code.co_firstlineno <= node.lineno <= last
    ]


def tree_of(file: str) -> ast.AST | None:
    """Return the syntax of a source file, None where it is none of Python. It is shared: a script
    is asked about in each step, and to parse it takes longer than a step of a small model.
    """
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=8)
def _parsed(source: str) -> ast.AST | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None
