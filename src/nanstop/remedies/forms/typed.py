"""A change of a user's file, run in the place of the operations that it replaces.

A replay has the operations of a line and no longer its variables. What an operation was given tells
what the expressions are that its line spells as its operands, and the new expression is computed of
these.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from nanstop.remedies.forms.calls import Call, line_in
from nanstop.remedies.forms.mode import LineMode
from nanstop.replay.function_modes import on_stack
from nanstop.rewrite.files import FileChange
from nanstop.rewrite.operations import Operation
from nanstop.rewrite.replaced import Replaced, copied, operations_in_order, replaced
from nanstop.rewrite.source import Scope, Source

_OF_PYTHON = frozenset({"max", "min", "len", "float", "int", "abs", "tuple"})


class _UnknownError(Exception):
    """An expression reads what no operation of its line was given."""


class Typed:
    """Answers the calls of one file as the changed file makes them.

    ``is_run``: whether every operation that the change replaces was met and computed anew, or what
    is new has raised.
    """

    def __init__(self, change: FileChange) -> None:
        self._file = change.file
        self._old = Source(change.before)
        self._found: Replaced | None = replaced(self._old, Source(change.after))
        self._statements: dict[int, ast.stmt | None] = {}
        self._operations: dict[ast.stmt, dict[str, list[Operation]]] = {}
        self._met: Counter[tuple[ast.stmt, str]] = Counter()
        self._given: dict[tuple[Scope, str], Any] = {}
        self._done: set[ast.expr] = set()
        self._is_unknown = self._raised = False

    @property
    def is_run(self) -> bool:
        wanted = set(self._found.by) if self._found is not None else set[ast.expr]()
        return self._raised or (bool(wanted) and self._done == wanted and not self._is_unknown)

    def answer(self, call: Call) -> Any:
        """Return what a call returns, by the new expression where it is replaced."""
        line = line_in(self._file) if call.name and self._found is not None else None
        statement = None if line is None else self._statement(line)
        same = [] if statement is None else self._named(statement, call.name)
        if statement is None or not same:
            return call.run()
        one = same[self._met[statement, call.name] % len(same)]
        self._met[statement, call.name] += 1
        scope = self._old.scope_of(statement)
        self._note(scope, one, call)
        result = self._computed(scope, one) if self._is_replaced(one) else None
        result = call.run() if result is None else result
        self._given[scope, ast.dump(one.node)] = result
        return result

    def _is_replaced(self, one: Operation) -> bool:
        return self._found is not None and one.node in self._found.by

    def _statement(self, line: int) -> ast.stmt | None:
        if line not in self._statements:
            self._statements[line] = self._old.statement_at(line)
        return self._statements[line]

    def _named(self, statement: ast.stmt, name: str) -> list[Operation]:
        if statement not in self._operations:
            found = self._operations.setdefault(statement, {})
            for one in operations_in_order(self._old, statement):
                found.setdefault(one.name, []).append(one)
        return self._operations[statement].get(name, [])

    def _note(self, scope: Scope, one: Operation, call: Call) -> None:
        given = call.args or (call.kwargs.get("input"),)
        for node, value in zip(one.args, given, strict=False):
            self._given[scope, ast.dump(node)] = value
        for name, node in one.keywords.items():
            if name in call.kwargs:
                self._given[scope, ast.dump(node)] = call.kwargs[name]

    def _computed(self, scope: Scope, one: Operation) -> Any:
        assert self._found is not None
        written = _Written(self, self._old, scope, self._found)
        try:
            node = written.visit(copied(self._found.by[one.node]))
            names = {name: self._value(name) for name in written.free}
        except _UnknownError:
            self._is_unknown = True
            return None
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<typed>", "eval")
        self._raised = True
        result = eval(code, {**names, **written.values})
        self._raised = False
        self._done.add(one.node)
        return result

    def given(self, scope: Scope, node: ast.expr) -> tuple[Any] | None:
        """Return what an expression was when it was read last, None where that is not known."""
        key = scope, ast.dump(node)
        return (self._given[key],) if key in self._given else None

    def _value(self, name: str) -> Any:
        """Return what a name is that no operation was given: torch's, or one of Python's."""
        if name in _OF_PYTHON:
            return getattr(builtins, name)
        package, *rest = self._old.imported.get(name, "").split(".")
        if package != "torch":
            raise _UnknownError
        found: Any = torch
        for part in rest:
            found = getattr(found, part)
        return found


class _Written(ast.NodeTransformer):
    """Puts values in the place of expressions, and expressions in that of new names."""

    def __init__(self, typed: Typed, source: Source, scope: Scope, found: Replaced) -> None:
        self._typed, self._source, self._scope, self._found = typed, source, scope, found
        self.values: dict[str, Any] = {}
        self.free: set[str] = set()

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.expr) or isinstance(node, ast.Constant):
            return super().visit(node)
        given = self._typed.given(self._scope, node)
        if given is not None:
            name = f"_{len(self.values)}"
            self.values[name] = given[0]
            return ast.Name(name, ast.Load())
        if isinstance(node, ast.Name):
            if node.id in self._found.named:
                return self.visit(copied(self._found.named[node.id]))
            self.free.add(node.id)
        made = self._found.constructed(self._source, node)
        if made is not None and isinstance(node, ast.Call):
            node.func = copied(made)
        return super().visit(node)


@contextmanager
def typed(changes: Sequence[FileChange]) -> Iterator[tuple[Typed, ...]]:
    """Have operations of files computed inside as the changed files make them."""
    found = tuple(Typed(one) for one in changes)
    with ExitStack() as scope:
        for one in found:
            scope.enter_context(on_stack(LineMode(one.answer)))
        yield found
