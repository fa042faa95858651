"""Variables that a script carries from one step into the next: running means, returns, states.

When a step fails, such a variable may hold what this step has come to by then, and nobody what the
operation has read. Its name is in the source. Asked of failures only.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator

from nanstop.numerics.tensors import has_bad
from nanstop.records import SourceLine
from nanstop.rewrite.source import LOOPS, nodes_around
from nanstop.tracing.source.assignments import function_at, tree_of
from nanstop.tracing.source.holders import HeldVariable, Holder, held_in, script_frames

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_APART = (*_FUNCTIONS, ast.Lambda, ast.ClassDef)
"""What lies in a loop and runs at another time."""


def carried_into(line: SourceLine | None) -> Holder | None:
    """Return the one variable that a statement reads and that only it, or what follows it in a
    loop around it, gives a value: in each pass but the first it holds what an earlier pass came to.
    Of attributes and global variables, the function around it is such a loop. None where there is
    no such variable, or several, or its value is finite by now: what was read is not kept in it, as
    of a batch that was fetched in the pass before. Reads that value.
    """
    tree = tree_of(line.file) if line is not None else None
    if line is None or tree is None:
        return None
    statements = nodes_around(tree, line.line, ast.stmt)
    if not statements:
        return None
    *outer, statement = sorted(statements, key=lambda n: (n.lineno, n.col_offset))
    found: dict[str, int] = {}
    for scope in reversed(outer):
        for name in _read_by(statement) - found.keys():
            given = sorted(_given_in(scope, name))
            if given and given[0] >= statement.lineno:
                found[name] = given[0]
        if isinstance(scope, _FUNCTIONS):
            break
    if len(found) != 1:
        return None
    ((name, number),) = found.items()
    held = _held_now(name, line)
    if held is None or not has_bad(held.tensor):
        return None
    text = linecache.getline(line.file, number).strip()
    made = SourceLine(file=line.file, line=number, function=line.function, text=text)
    return Holder(held.name, made, before=True)


def _held_now(name: str, line: SourceLine) -> HeldVariable | None:
    """Return what a variable that a line reads, or an attribute of the classes in its file, holds
    by now. A variable of the same name in another function is another one.
    """
    tree, variable = tree_of(line.file), name.rpartition(".")[2]
    function = function_at(tree, line.line) if tree is not None else ""
    for frame, _ in script_frames():
        for held in held_in(frame):
            place = held.place
            if (place.file, place.variable, place.attribute) != (line.file, variable, "." in name):
                continue
            if not held.is_local or place.attribute or frame.f_code.co_name == function:
                return held
    return None


def _read_by(statement: ast.stmt) -> set[str]:
    """Return the variables and attributes that a statement reads, not what a block holds."""
    found = {ast.unparse(statement.target)} if isinstance(statement, ast.AugAssign) else set()
    for part in ast.iter_child_nodes(statement):
        if not isinstance(part, ast.stmt | ast.ExceptHandler):
            found |= {ast.unparse(node) for node in ast.walk(part) if _is_read(node)}
    return found


def _is_read(node: ast.AST) -> bool:
    return isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)


def _given_in(scope: ast.stmt, name: str) -> Iterator[int]:
    """Yield the lines of a loop that give a variable a value, or of a function if it outlives its
    call.
    """
    if isinstance(scope, _FUNCTIONS):
        shared = [n for n in _within(scope) if isinstance(n, ast.Global | ast.Nonlocal)]
        if "." not in name and not any(name in one.names for one in shared):
            return
    elif not isinstance(scope, LOOPS):
        return
    for node in _within(scope):
        target = node
        while isinstance(target, ast.Subscript) and isinstance(target.ctx, ast.Store):
            target = target.value
        is_target = target is not node or isinstance(getattr(node, "ctx", None), ast.Store)
        if is_target and ast.unparse(target) == name:
            yield getattr(node, "lineno", 0)


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when ``scope`` does: no function that is only defined in it."""
    for node in ast.iter_child_nodes(scope):
        yield node
        if not isinstance(node, _APART):
            yield from _within(node)
