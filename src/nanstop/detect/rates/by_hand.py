"""The learning rates that a script sets by itself, and those that it is going to set: its own
expression is computed for later steps.

Nothing of the script is run. What its line computes is computed anew of the numbers that its
variables hold, with the count of its loop further on; arithmetic, comparisons and functions of
numbers alone, so that nothing can have an effect. That the expression is understood is shown by its
giving the rate that the optimizer has now.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from inspect import CO_OPTIMIZED
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from nanstop.frozen import frozen
from nanstop.records import SourceLine
from nanstop.rewrite.source import LOOPS, nodes_around
from nanstop.tracing.source.assignments import function_at, tree_of

_FUNCTIONS = frozenset({"len", "min", "max", "abs", "float", "int", "round", "pow", "bool"})
_KEY = "lr"
"""What every optimizer of torch calls its rate."""
_DEEPEST = 24
_ALIKE = 1e-6
_BINARY: Mapping[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
    ast.Pow: math.pow, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_UNARY: Mapping[type[ast.AST], Callable[[Any], Any]] = {
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Not: operator.not_,
}  # fmt: skip


class UnknownError(Exception):
    """A part of an expression is more than arithmetic."""


@frozen
class RatesToCome:
    """``at``: the line that sets the rate; ``rates``: after each number of steps that was asked."""

    at: SourceLine
    rates: tuple[float, ...]


def rates_to_come(frame: FrameType, rate: float, ahead: Sequence[int]) -> RatesToCome | None:
    """Return the rates that the loop of ``frame`` sets for its optimizer some steps ahead, None
    where the source does not say, or says another one of now than ``rate``.
    """
    file, tree = frame.f_code.co_filename, tree_of(frame.f_code.co_filename)
    loops = [] if tree is None else nodes_around(tree, frame.f_lineno, *LOOPS)
    own = "" if tree is None else function_at(tree, frame.f_lineno)
    loops = [one for one in loops if tree is not None and function_at(tree, one.lineno) == own]
    if tree is None or not loops:
        return None
    inner = max(loops, key=lambda node: node.lineno)
    scope = _Scope(_variables(frame), inner.body, _counters(loops), tree)
    for value, given in _settings(inner, scope):
        try:
            with _numpy_says_nothing():
                now, *later = (float(given.at(steps).value(value)) for steps in (0, *ahead))
        except (UnknownError, ArithmeticError, LookupError, ValueError, TypeError):
            continue
        if abs(now - rate) <= _ALIKE * abs(rate):
            text = linecache.getline(file, value.lineno).strip()
            function = function_at(tree, value.lineno)
            at = SourceLine(file=file, line=value.lineno, function=function, text=text)
            return RatesToCome(at, tuple(later))
    return None


def _numpy_says_nothing() -> AbstractContextManager[Any]:
    """Return what keeps NumPy from warning of a number that it has no value for: the script has not
    come there, and may never.
    """
    numpy = sys.modules.get("numpy")
    return numpy.errstate(all="ignore") if numpy is not None else nullcontext()


def _variables(frame: FrameType) -> dict[str, Any]:
    found = {**frame.f_globals, **frame.f_locals}
    if sys.version_info < (3, 13) and frame.f_code.co_flags & CO_OPTIMIZED:
        frame.f_locals.clear()  # a copy that the frame keeps would hold the step's graph (PEP 667)
    return found


def _counters(loops: Sequence[ast.stmt]) -> frozenset[str]:
    """Return the variables that some loops count their passes with."""
    found: set[str] = set()
    for loop in loops:
        called = loop.iter if isinstance(loop, ast.For) else None
        function = called.func if isinstance(called, ast.Call) else None
        kind = function.id if isinstance(function, ast.Name) else ""
        target = loop.target if isinstance(loop, ast.For) else None
        if kind == "enumerate" and isinstance(target, ast.Tuple):
            target = target.elts[0]
        if kind in ("range", "enumerate") and isinstance(target, ast.Name):
            found.add(target.id)
    inner = max(loops, key=lambda node: node.lineno)
    for node in ast.walk(inner):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            step = node.value.value if isinstance(node.value, ast.Constant) else None
            found |= {node.target.id} if isinstance(node.op, ast.Add) and step == 1 else set()
    return frozenset(found)


def _is_table(held: Any) -> bool:
    """Return whether an element of it is read without an effect."""
    kind = type(held)
    is_array = (kind.__module__, kind.__name__) == ("numpy", "ndarray")
    return kind in (dict, list, tuple) or (is_array and held.ndim == 1)


@dataclass(frozen=True)
class _Scope:
    """What names stand for in some statements: what they give a value is computed anew."""

    known: Mapping[str, Any]
    body: Sequence[ast.stmt]
    counters: frozenset[str]
    tree: ast.AST
    steps: int = 0
    depth: int = 0
    _open: set[str] = field(default_factory=set)

    def at(self, steps: int) -> _Scope:
        """Return it some passes of its loop further on."""
        known = {
            name: value.at(steps) if isinstance(value, _Later) else value
            for name, value in self.known.items()
        }
        return _Scope(known, self.body, self.counters, self.tree, steps, self.depth)

    def value(self, node: ast.expr | None) -> Any:
        """Return what an expression is. Errors: ``UnknownError``, and those of arithmetic."""
        if self.depth > _DEEPEST:
            raise UnknownError
        found: Any = None
        match node:
            case ast.Constant():
                found = node.value
            case ast.Name():
                found = self._named(node.id)
            case ast.BinOp() if type(node.op) in _BINARY:
                found = _BINARY[type(node.op)](self.value(node.left), self.value(node.right))
            case ast.UnaryOp() if type(node.op) in _UNARY:
                found = _UNARY[type(node.op)](self.value(node.operand))
            case ast.Compare() if len(node.ops) == 1 and type(node.ops[0]) in _BINARY:
                compare = _BINARY[type(node.ops[0])]
                found = compare(self.value(node.left), self.value(node.comparators[0]))
            case ast.IfExp():
                found = self.value(node.body if self.value(node.test) else node.orelse)
            case ast.Call() if not node.keywords:
                found = self._called(node)
            case ast.Attribute():
                found = self._attribute(self.value(node.value), node.attr)
            case ast.Subscript():
                held, key = self.value(node.value), self.value(node.slice)
                if not _is_table(held) or type(key) not in (str, int):
                    raise UnknownError
                found = held[key]
            case _:
                raise UnknownError
        return found

    def _named(self, name: str) -> Any:
        if name in self.counters and type(self.known.get(name)) in (int, float):
            return self.known[name] + self.steps
        given = [
            node.value
            for one in self.body
            for node in ast.walk(one)
            if isinstance(node, ast.Assign)
            and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)
        ]
        if len(given) == 1 and name not in self._open:
            self._open.add(name)
            try:
                return self.value(given[0])
            finally:
                self._open.discard(name)
        if given or (name not in self.known and name not in _FUNCTIONS):
            raise UnknownError
        found = self.known.get(name, getattr(builtins, name, None))
        return found.value() if isinstance(found, _Later) else found

    def _attribute(self, held: Any, name: str) -> Any:
        if isinstance(held, ModuleType) and held.__name__ in ("math", "numpy"):
            return getattr(held, name)
        plain = type(held).__name__ == "Namespace" or isinstance(held, SimpleNamespace)
        if plain and name in vars(held):
            return vars(held)[name]
        raise UnknownError

    def _called(self, node: ast.Call) -> Any:
        function = self.value(node.func)
        given = [self.value(one) for one in node.args]
        if function is len and _is_table(given[0]):
            return len(given[0])
        if not all(isinstance(one, int | float) for one in given):
            raise UnknownError
        is_plain = getattr(function, "__module__", "") in ("math", "builtins") or (
            type(function).__name__ == "ufunc"
        )
        if isinstance(function, BuiltinFunctionType | type) or type(function).__name__ == "ufunc":
            if not is_plain:
                raise UnknownError
            return function(*given)
        made = _definition(self.tree, function)
        if made is None:
            raise UnknownError
        names = [one.arg for one in made.args.args]
        usual = function.__defaults__ or ()
        known = dict(zip(names[len(names) - len(usual) :], usual, strict=True))
        known |= dict(zip(names, given, strict=False))
        if len(given) > len(names) or known.keys() != set(names):
            raise UnknownError
        inner = _Scope(
            {**function.__globals__, **known}, made.body, frozenset(), self.tree, 0, self.depth + 1
        )
        return inner.returned(made.body)

    def returned(self, body: Sequence[ast.stmt]) -> Any:
        """Return what statements give back: assignments, branches, and a return."""
        for one in body:
            if isinstance(one, ast.Return):
                return self.value(one.value)
            if isinstance(one, ast.If):
                taken = one.body if self.value(one.test) else one.orelse
                if (found := self.returned(taken)) is not None:
                    return found
            elif not isinstance(one, ast.Assign | ast.Expr):
                raise UnknownError
        return None


@dataclass(frozen=True)
class _Later:
    """An argument that is computed where it is asked for."""

    node: ast.expr
    scope: _Scope

    def at(self, steps: int) -> _Later:
        return _Later(self.node, self.scope.at(steps))

    def value(self) -> Any:
        return self.scope.value(self.node)


def _settings(loop: ast.AST, scope: _Scope) -> Iterator[tuple[ast.expr, _Scope]]:
    """Yield the expressions that a loop, or a function of the file that it calls, gives as a rate,
    with what names stand for there.
    """
    yield from ((value, scope) for value in _given(loop))
    for call in ast.walk(loop):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            continue
        made = _definition(scope.tree, scope.known.get(call.func.id))
        if made is not None and not call.keywords and len(call.args) == len(made.args.args):
            names = [one.arg for one in made.args.args]
            later = {n: _Later(a, scope) for n, a in zip(names, call.args, strict=True)}
            inner = _Scope({**scope.known, **later}, made.body, frozenset(), scope.tree)
            yield from ((value, inner) for value in _given(made))


def _given(block: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(block):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for one in targets:
            key = one.slice if isinstance(one, ast.Subscript) else None
            if isinstance(node, ast.Assign) and isinstance(key, ast.Constant) and key.value == _KEY:
                yield node.value


def _definition(tree: ast.AST, function: Any) -> ast.FunctionDef | None:
    """Return the source of a function of the same file, None of any other."""
    if not isinstance(function, FunctionType):
        return None
    code = function.__code__
    made = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return next(
        (n for n in made if (n.name, n.lineno) == (code.co_name, code.co_firstlineno)), None
    )
