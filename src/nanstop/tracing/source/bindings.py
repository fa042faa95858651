"""Which lines of a script gave the variables a value that one of its lines works with: the list
that a loop goes through, the number that a product is made with.

Asked where something was found: the source is read.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

from nanstop.numerics.tensors import is_in_place
from nanstop.records import SourceLine
from nanstop.rewrite.source import nodes_around
from nanstop.tracing.source.assignments import Assignment, bindings, function_at, tree_of
from nanstop.tracing.source.holders import script_frames

MOST_LINES = 2
"""Of a variable that is given a value in several lines the last of those ahead of its use."""
_MOST_LINKS = 8
_CODE = (ast.FunctionDef, ast.Lambda)


def target_given_at(line: SourceLine) -> tuple[SourceLine, ...]:
    """Return the lines that gave a value to the variable that a line writes to, or to what it is
    an element of, the last one first; () where the source does not say.
    """
    return _given_at(line, _written)


def factors_given_at(line: SourceLine) -> tuple[SourceLine, ...]:
    """Return the lines that gave a value to the variables that a line reads beside the one that it
    writes to, none of which is an element of what a loop goes through.
    """
    return _given_at(line, _read, through_loops=False)


def sliced_after(line: SourceLine) -> tuple[SourceLine, ...]:
    """Return the lines after one, of the same function, that take a slice of the variable which it
    gives a value.
    """
    tree = tree_of(line.file)
    statements = [] if tree is None else nodes_around(tree, line.line, ast.Assign)
    if tree is None or not statements:
        return ()
    given = _written(statements[-1])
    own = function_at(tree, line.line)
    numbers = sorted(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Slice)
        and node.lineno > line.line
        and _root(node) in given
    )
    return tuple(_source(tree, line.file, n) for n in numbers if function_at(tree, n) == own)


def handed_on_after(line: SourceLine) -> tuple[SourceLine, ...]:
    """Return the first line after one, of the same function, that gives another variable a value
    made of the one which that line gives.
    """
    tree = tree_of(line.file)
    statements = [] if tree is None else nodes_around(tree, line.line, ast.Assign)
    if tree is None or not statements:
        return ()
    given, own = _written(statements[-1]), function_at(tree, line.line)
    numbers = sorted(
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and node.lineno > line.line
        and function_at(tree, node.lineno) == own
        and any(isinstance(n, ast.Name) and n.id in given for n in ast.walk(node.value))
    )
    return tuple(_source(tree, line.file, number) for number in numbers[:1])


def elements_read_at(frame: FrameType, name: str) -> tuple[SourceLine, ...]:
    """Return the lines of a running function, up to where it is, that take an element of one of
    its variables by a key.
    """
    file, tree = frame.f_code.co_filename, tree_of(frame.f_code.co_filename)
    if tree is None:
        return ()
    own = function_at(tree, frame.f_lineno)
    numbers = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        and node.lineno < frame.f_lineno
        and function_at(tree, node.lineno) == own
    }
    return tuple(_source(tree, file, number) for number in sorted(numbers))


def memory_given_at() -> tuple[SourceLine, ...]:
    """Return the lines of the running functions of the script that give a tensor the memory of
    another: those of the innermost that has any.
    """
    for frame, _ in script_frames():
        file, tree = frame.f_code.co_filename, tree_of(frame.f_code.co_filename)
        own = function_at(tree, frame.f_lineno) if tree is not None else ""
        numbers = {
            node.lineno
            for node in (ast.walk(tree) if tree is not None else ())
            if isinstance(node, ast.Assign)
            and any(isinstance(to, ast.Attribute) and to.attr == "data" for to in node.targets)
            and function_at(tree or node, node.lineno) == own
        }
        if tree is not None and numbers:
            return tuple(_source(tree, file, number) for number in sorted(numbers)[:MOST_LINES])
    return ()


def writing_lines(code: CodeType) -> tuple[int, ...]:
    """Return the lines of a function that write to a tensor in place, set an attribute of one, or
    give something back, in the order of the text.
    """
    tree = tree_of(code.co_filename)
    around = [] if tree is None else nodes_around(tree, code.co_firstlineno, *_CODE)
    own = next((n for n in around if n.lineno == code.co_firstlineno), None)
    if own is None:
        return ()
    return tuple(sorted({line for node in ast.walk(own) if (line := _writes(node)) is not None}))


def _writes(node: ast.AST) -> int | None:
    is_write = isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Return) and node.value is not None
    )
    if isinstance(node, ast.Assign):
        is_write = any(not isinstance(to, ast.Name) for to in node.targets)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        is_write = is_in_place(node.func.attr)
    return getattr(node, "lineno", None) if is_write else None


def _given_at(
    line: SourceLine, names_of: Callable[[ast.stmt], list[str]], *, through_loops: bool = True
) -> tuple[SourceLine, ...]:
    tree = tree_of(line.file)
    statements = [] if tree is None else nodes_around(tree, line.line, ast.stmt)
    if tree is None or not statements:
        return ()
    statement = max(statements, key=lambda node: (node.lineno, node.col_offset))
    found: dict[int, None] = {}
    for name in names_of(statement):
        links = list(_links(tree, line, name))
        if through_loops or len(links) < 2:
            found |= dict.fromkeys(_last_ahead(tree, line, links[-1]))
    return tuple(_source(tree, line.file, number) for number in found if number != line.line)


def _last_ahead(tree: ast.AST, line: SourceLine, name: str) -> list[int]:
    """Return the last lines that give a variable a value ahead of a line, the latest first; any of
    a scope around its function may have run before it.
    """
    lines = sorted(bindings(tree, Assignment(line.file, line.line, name)))
    own = function_at(tree, line.line)
    ahead = [one for one in lines if one < line.line or function_at(tree, one) != own]
    return (ahead or lines)[: -MOST_LINES - 1 : -1]


def _source(tree: ast.AST, file: str, number: int) -> SourceLine:
    text = linecache.getline(file, number).strip()
    return SourceLine(file=file, line=number, function=function_at(tree, number), text=text)


def _links(tree: ast.AST, line: SourceLine, name: str) -> Iterator[str]:
    """Yield a variable, the one that it is an element of, and so on, as loops around a line say."""
    loops = sorted(nodes_around(tree, line.line, ast.For), key=lambda node: -node.lineno)
    for _ in range(_MOST_LINKS):
        yield name
        made = (element for loop in loops if (element := _element(loop.target, loop.iter, name)))
        following = next(made, None)
        if following is None or following == name:
            return
        name = following


def _element(target: ast.expr, source: ast.expr, name: str) -> str | None:
    """Return the variable that a loop's variable of this name is an element of."""
    if isinstance(target, ast.Name):
        return _root(source) if target.id == name else None
    if not isinstance(target, ast.Tuple | ast.List):
        return None
    called = source.func if isinstance(source, ast.Call) else None
    kind = called.id if isinstance(called, ast.Name) else ""
    given = source.args if isinstance(source, ast.Call) else []
    for place, part in enumerate(target.elts):
        inner = source
        if kind == "zip" and len(given) == len(target.elts):
            inner = given[place]
        elif kind == "enumerate" and given:
            inner = given[0] if place else source
        if (found := _element(part, inner, name)) is not None:
            return found
    return None


def _root(node: ast.expr) -> str | None:
    """Return the variable that an expression is a part of, or made of by one of its methods."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Call) and len(node.args) == 1:
            node = node.args[0]
        else:
            return None
    return node.id


def _written(statement: ast.stmt) -> list[str]:
    """Return the variables that a statement writes to."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.AugAssign):
        targets = [statement.target]
    elif isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.Expr):
        calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
        targets = [
            call.func.value
            for call in calls
            if isinstance(call.func, ast.Attribute) and is_in_place(call.func.attr)
        ]
    return [name for one in targets if (name := _root(one)) is not None]


def _read(statement: ast.stmt) -> list[str]:
    """Return the variables that a statement reads and does not write to, in the order of the
    text; not the functions that it calls.
    """
    parts = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
    called = {id(n.func) for n in ast.walk(statement) if isinstance(n, ast.Call)}
    written = _written(statement)
    found = [n.id for n in parts if isinstance(n.ctx, ast.Load) and id(n) not in called]
    return [name for name in dict.fromkeys(found) if name not in written]
