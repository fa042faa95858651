"""A change of a user's file, run in the place of the operations that it replaces.

A replay has the operations of a line and no longer its variables. What an operation was given tells
what the expressions are that its line spells as its operands, and the new expression is computed of
these.
"""

from __future__ import annotations

import ast
import builtins
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import takewhile
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nanstop.remedies.forms.calls import Call, frame_in
from nanstop.remedies.forms.mode import answered
from nanstop.remedies.forms.wide import out_of_autocast
from nanstop.replay.path import no_choices
from nanstop.rewrite.files import FileChange
from nanstop.rewrite.operations import Operation, constant_of
from nanstop.rewrite.replaced import Replaced, copied, operations_in_order, replaced
from nanstop.rewrite.source import COMPREHENSIONS, SCOPES, UNSURE, Source, Span, span_at, span_of
from nanstop.tracebacks import place_of

_OF_PYTHON = frozenset({"max", "min", "len", "float", "int", "abs", "tuple"})
_OF_PYTHON |= {"sum", "zip", "range", "enumerate", "list"}
_PACKAGES: Mapping[str, Any] = {"torch": torch, "math": math}
_INNER = (ast.Lambda, *COMPREHENSIONS)


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
        self._statements: dict[int, tuple[ast.stmt, ...]] = {}
        self._operations: dict[ast.stmt, dict[str, list[Operation]]] = {}
        self._met: Counter[tuple[ast.stmt, str]] = Counter()
        self._given: dict[tuple[ast.AST, str], Any] = {}
        self._logs: dict[tuple[ast.AST, str], Tensor] = {}
        self._done: set[ast.expr] = set()
        self._is_unknown = self._raised = False

    @property
    def is_run(self) -> bool:
        wanted = self._wanted()
        return self._raised or (bool(wanted) and self._done == wanted and not self._is_unknown)

    def _wanted(self) -> set[ast.expr]:
        return set(self._found.by) if self._found is not None else set()

    @property
    def is_refuted(self) -> bool:
        """Whether something that is replaced was no operation of torch's, though its statement was
        run: one of numbers of Python's, which have no methods of a tensor.
        """
        left = self._wanted() - self._done
        run = {self._old.statement_of(one) for one in self._done}
        missed = [one for one in left if isinstance(one, ast.BinOp) and not self._is_unsure(one)]
        return not self._is_unknown and any(self._old.statement_of(one) in run for one in missed)

    def answer(self, call: Call) -> Any:
        """Return what a call returns, by the new expression where it is replaced."""
        frame = frame_in(self._file) if call.spelled and self._found is not None else None
        if frame is None:
            return call.run()
        with self._autocast(frame, call):
            return self._answered(frame, call)

    def _autocast(self, frame: FrameType, call: Call) -> AbstractContextManager[object]:
        """Return the block without autocast that a frame is in now, where it is in one."""
        if self._found is None or not self._found.apart:
            return nullcontext()
        statement = self._statement(frame.f_lineno, span_at(*place_of(frame)))
        tensors = [one for one in tree_leaves(call.args) if isinstance(one, Tensor)]
        if statement not in self._found.apart or not tensors:
            return nullcontext()
        return out_of_autocast(tensors[0].device.type)

    def _answered(self, frame: FrameType, call: Call) -> Any:
        one = self._meant(frame, call.spelled)
        if one is None:
            self._note_others(frame, call)
            return call.run()
        scope = self._scope_of(one.node)
        self._note(scope, one, call)
        result = self._computed(scope, one) if self._is_replaced(one) else None
        result = call.run() if result is None else result
        self._keep(scope, one.node, result)
        return result

    def _meant(self, frame: FrameType, name: str) -> Operation | None:
        """Return the operation of a name that a frame makes just now."""
        span = span_at(*place_of(frame))
        statement = self._statement(frame.f_lineno, span)
        same = [] if statement is None else self._named(statement, name)
        if span is not None:
            at_end = [one for one in same if span_of(one.node)[1] == span[1]]
            exact = [one for one in at_end if span_of(one.node) == span]
            return next(iter((*exact, *at_end)), None)  # a method may begin at its name
        if statement is None or not same or any(self._is_unsure(one.node) for one in same):
            return None
        self._met[statement, name] += 1
        return same[(self._met[statement, name] - 1) % len(same)]

    def _is_unsure(self, node: ast.expr) -> bool:
        around = takewhile(lambda one: not isinstance(one, ast.stmt), self._old.around(node))
        return any(isinstance(one, UNSURE) for one in around)

    def _scope_of(self, node: ast.expr) -> ast.AST:
        """Return what binds the names that an expression reads, a comprehension among them."""
        kinds = (*SCOPES, *COMPREHENSIONS)
        return next(one for one in self._old.around(node) if isinstance(one, kinds))

    def _is_replaced(self, one: Operation) -> bool:
        return self._found is not None and one.node in self._found.by

    def _statement(self, line: int, span: Span | None) -> ast.stmt | None:
        """Return the statement of a line that a span lies in, the last of them without a span."""
        if line not in self._statements:
            self._statements[line] = self._old.statements_at(line)[::-1]
        for one in self._statements[line]:
            if span is None or _lies_in(span, one):
                return one
        return None

    def _named(self, statement: ast.stmt, name: str) -> list[Operation]:
        if statement not in self._operations:
            found = self._operations.setdefault(statement, {})
            for one in operations_in_order(self._old, statement):
                found.setdefault(one.name, []).append(one)
        return self._operations[statement].get(name, [])

    def _note(self, scope: ast.AST, one: Operation, call: Call) -> None:
        given = call.args or (call.kwargs.get("input"),)
        if isinstance(one.node, ast.BinOp) and self._is_turned(scope, one, given):
            given = given[::-1]
        for node, value in zip(one.args, given, strict=False):
            self._keep(scope, node, value)
        for name, node in one.keywords.items():
            if name in call.kwargs:
                self._keep(scope, node, call.kwargs[name])

    def _keep(self, scope: ast.AST, node: ast.expr, value: Any) -> None:
        """Keep what an expression is. Where it was another value, as in the call before, what is
        made of it is no longer known.
        """
        key, text = (scope, ast.dump(node)), ast.dump(node)
        if key in self._given and self._given[key] is not value:
            made = [one for one in self._given if one[0] is scope and text in one[1]]
            for one in made:
                del self._given[one]
        self._given[key] = value

    def _is_turned(self, scope: ast.AST, one: Operation, given: tuple[Any, ...]) -> bool:
        """Return whether torch was given the operands of a sum or a product the other way round: a
        number times a tensor is the tensor times it.
        """
        if one.name not in ("add", "mul") or len(given) != 2 or isinstance(given[1], Tensor):
            return False
        right = self.given(scope, one.args[1])
        return constant_of(self._old, one.args[0]) is not None or (
            right is not None and right[0] is given[0]
        )

    def _note_others(self, frame: FrameType, call: Call) -> None:
        """Note what is read by an index or by a method that no rewriting knows."""
        span = span_at(*place_of(frame))
        statement = self._statement(frame.f_lineno, span)
        if statement is None or span is None:
            return
        for node in ast.walk(statement):
            if isinstance(node, ast.expr) and span_of(node) == span:
                for read, value in _read_by(node, call):
                    self._keep(self._scope_of(node), read, value)

    def _computed(self, scope: ast.AST, one: Operation) -> Any:
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
        with no_choices():
            result = eval(code, {**names, **written.values})
        self._raised = False
        self._done.add(one.node)
        name = self._found.logs.get(one.node)
        if name is None:
            return result
        self._logs[scope, name] = result
        return torch.exp(result)  # which nothing that is replaced reads

    def log(self, scope: ast.AST, name: str) -> Tensor | None:
        """Return the logarithm that a variable holds now, None for a variable that holds none."""
        number = self._found.numbers.get(name) if self._found is not None else None
        if number is None or (scope, name) in self._logs:
            return self._logs.get((scope, name))
        given = self.given(scope, ast.Name(number, ast.Load()))
        return torch.log(given[0]) if given is not None else None

    def given(self, scope: ast.AST, node: ast.expr) -> tuple[Any] | None:
        """Return what an expression was when it was read last, None where that is not known."""
        key = scope, ast.dump(node)
        return (self._given[key],) if key in self._given else None

    def _value(self, name: str) -> Any:
        """Return what a name is that no operation was given: torch's, math's, one of Python's."""
        if name in _OF_PYTHON:
            return getattr(builtins, name)
        package, *rest = self._old.imported.get(name, "").split(".")
        if package not in _PACKAGES:
            raise _UnknownError
        found: Any = _PACKAGES[package]
        for part in rest:
            found = getattr(found, part)
        return found


def _lies_in(span: Span, statement: ast.stmt) -> bool:
    (line, column), (last, end) = span
    start = statement.lineno, statement.col_offset
    stop = statement.end_lineno or statement.lineno, statement.end_col_offset or 0
    return start <= (line or 0, column or 0) and (last or 0, end or 0) <= stop


def _read_by(node: ast.expr, call: Call) -> Iterator[tuple[ast.expr, Any]]:
    """Yield the operands that an index or a call of a tensor's method spells, and their values."""
    if isinstance(node, ast.Subscript) and call.name == "getitem":
        value, index = call.args
        yield node.value, value
        if isinstance(node.slice, ast.Tuple) and isinstance(index, tuple):
            yield from zip(node.slice.elts, index, strict=False)
        else:
            yield node.slice, index
    func = node.func if isinstance(node, ast.Call) else None
    if isinstance(func, ast.Attribute) and getattr(Tensor, func.attr, None) == call.function:
        assert isinstance(node, ast.Call)
        yield from zip((func.value, *node.args), call.args, strict=False)


class _Written(ast.NodeTransformer):
    """Puts values in the place of expressions, and expressions in that of new names."""

    def __init__(self, typed: Typed, source: Source, scope: ast.AST, found: Replaced) -> None:
        self._typed, self._source, self._scope, self._found = typed, source, scope, found
        self.values: dict[str, Any] = {}
        self.free: set[str] = set()
        self._bound: frozenset[str] = frozenset()

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.expr) or isinstance(node, ast.Constant):
            return super().visit(node)
        if isinstance(node, _INNER):
            return self._inner(node)
        if isinstance(node, ast.Name) and node.id in self._bound | self.values.keys():
            return node
        is_inner = any(isinstance(n, ast.Name) and n.id in self._bound for n in ast.walk(node))
        given = None if is_inner else self._typed.given(self._scope, node)
        log = self._typed.log(self._scope, node.id) if isinstance(node, ast.Name) else None
        given = given if log is None else (log,)
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

    def _inner(self, node: ast.AST) -> Any:
        """Visit what binds names of its own, whose values no operation around it was given."""
        before, nodes = self._bound, [*ast.walk(node)]
        for one in getattr(node, "generators", [])[:1]:
            one.iter = self.visit(one.iter)  # is evaluated outside
        stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self._bound = before | stored | {n.arg for n in nodes if isinstance(n, ast.arg)}
        result = super().visit(node)
        self._bound = before
        return result


@contextmanager
def typed(changes: Sequence[FileChange]) -> Iterator[tuple[Typed, ...]]:
    """Have operations of files computed inside as the changed files make them."""
    found = tuple(Typed(one) for one in changes)
    with ExitStack() as scope:
        for one in found:
            scope.enter_context(answered(one.answer))
        yield found
