"""What a name stands for where it is read: its assignment, if nothing came between the two."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import takewhile

from nanstop.rewrite.source import LOOPS, SCOPES, Source, block_of


def definition(source: Source, name: ast.Name, until: ast.stmt) -> ast.Assign | None:
    """Return the assignment that gave a name its value.

    None where another may have, where the value was changed in place since, or where what it was
    made from is bound or changed anew before the statement ``until`` has read it.
    """
    scope, use = source.scope_of(name), source.statement_of(name)
    made = [one for one in _before(source, use) if _binds_alone(one, name.id)]
    if not made or isinstance(scope, ast.Lambda):
        return None
    found = made[-1]
    assert isinstance(found, ast.Assign)
    read = {
        ast.unparse(node)
        for node in ast.walk(found.value)
        if isinstance(node, ast.Name | ast.Attribute)
    }
    if _is_changed(source, {name.id}, found, use) or _is_changed(source, read, found, until):
        return None
    return found if _declares_nothing(scope, name.id) else None


def _is_changed(source: Source, names: set[str], first: ast.stmt, last: ast.stmt) -> bool:
    changed = {text for node in _between(source, first, last) for text in _changes(node)}
    return any(_overlap(one, other) for one in changed for other in names)


def _before(source: Source, use: ast.stmt) -> list[ast.stmt]:
    """Return the statements of the same function that have surely run before, in their order."""
    found: list[ast.stmt] = []
    node: ast.AST = use
    for parent in source.around(use):
        before = takewhile(lambda one, use=node: one is not use, block_of(parent, node))
        found = [*before, *found]
        if isinstance(parent, SCOPES):
            break
        node = parent
    return found


def _binds_alone(statement: ast.stmt, name: str) -> bool:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    target = statement.targets[0]
    return isinstance(target, ast.Name) and target.id == name


def _between(source: Source, first: ast.stmt, last: ast.stmt) -> Iterator[ast.AST]:
    """Yield what may run after ``first`` and before ``last`` reads: all of a loop around it too."""
    again = [
        node
        for node in (last, *source.around(last))
        if isinstance(node, LOOPS) and node.lineno > first.lineno
    ]
    start = source.span(first)[1]
    end = source.span(again[-1] if again else last)[1]
    for node in ast.walk(source.scope_of(first)):
        if not isinstance(node, ast.expr | ast.stmt) or not start <= source.span(node)[0] < end:
            continue
        if again or not _is_target(source, node, last):
            yield node


def _is_target(source: Source, node: ast.AST, statement: ast.stmt) -> bool:
    """Return whether a statement binds a name once all of it is read; a comprehension does not."""
    if not isinstance(getattr(node, "ctx", None), ast.Store):
        return False
    inner = (ast.comprehension, ast.NamedExpr)
    around = source.around(node)
    return next(one for one in around if isinstance(one, (ast.stmt, *inner))) is statement


def _changes(node: ast.AST) -> Iterator[str]:
    """Yield the names whose values a node binds or changes in place."""
    if isinstance(node, ast.Name | ast.Attribute) and not isinstance(node.ctx, ast.Load):
        yield ast.unparse(node)
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        yield ast.unparse(node.value)
    elif isinstance(node, ast.Call):
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr.endswith("_") and func.attr[:2] != "__":
            yield _root(func.value)
        if any(one.arg in ("inplace", "out") for one in node.keywords):
            yield from (_root(one) for one in node.args[:1])
            yield from (_root(one.value) for one in node.keywords if one.arg == "out")
    elif isinstance(node, ast.Global | ast.Nonlocal):
        yield from node.names


def _root(node: ast.AST) -> str:
    """Return the name that a chain of views begins with."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return ast.unparse(node)


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _declares_nothing(scope: ast.AST, name: str) -> bool:
    return not any(
        isinstance(node, ast.Global | ast.Nonlocal) and name in node.names
        for node in ast.walk(scope)
    )
