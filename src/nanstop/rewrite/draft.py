"""A rewriting in the making: what is put in the place of an expression, and lines before it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from nanstop.rewrite.definitions import definition
from nanstop.rewrite.operations import METHODS, Operation, is_cheap, operation
from nanstop.rewrite.source import UNSURE, Edit, Source, expressions_of, is_closed, parsed

_MOST = {"float16": "11", "float64": "709"}
"""A number whose exponential each format holds."""
_TINY = {"float16": "6.1e-5", "float64": "2.3e-308"}
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)


class NotKnownError(Exception):
    """No rewriting of this is known."""


def is_simple(statement: ast.stmt) -> bool:
    """Return whether a statement holds no others."""
    return isinstance(statement, _SIMPLE)


@dataclass(slots=True)
class Draft:
    """``statement``: what is rewritten. ``dtype``: the format that the failing operation read.
    ``device``: the kind of its device, "" where that is not known.
    ``lines``: what is put before the statement. ``edits``: all else.
    """

    source: Source
    statement: ast.stmt
    dtype: str = "float32"
    device: str = ""
    counted: bool = False
    """Whether what has no value is that of a whole number, a count: 0 or 1 at least."""
    infinite: bool = False
    """Whether it has made Inf: then it did not divide 0 by 0."""
    of_size: bool = False
    """Whether it divides by what is 0 at least: a norm, a deviation, a largest magnitude."""
    hiding: int | None = None
    """The place of the only operand that holds -Inf."""
    kept: bool = False
    """Whether what is infinite stays so large, and has no derivative."""
    bounded: bool = False
    """Whether numbers are kept within a usual bound, not within that of their format."""
    masked: bool = False
    """Whether what has no value is left out element by element."""
    innermost: bool = False
    """Whether of operations that stand within each other the inner ones are rewritten."""
    by_number: bool = False
    """Whether what it divides by is a number of Python's."""
    by_array: bool = False
    """Whether what it divides by is an array of NumPy's."""
    least: float = 0.0
    """The least number other than 0 that the failing root was of, 0 where that is not known."""
    of_matrices: bool = False
    """Whether what stands on the right of a product is a matrix, else a vector."""
    log_of_variable: Callable[[str], str | None] = field(default=lambda _: None)
    """What the logarithm of a variable is called, None of one that has none of its own."""
    lines: list[str] = field(default_factory=list[str])
    edits: list[Edit] = field(default_factory=list[Edit])

    def operation(self, node: ast.AST) -> Operation | None:
        """Return what a node computes; of a name, what its assignment does."""
        return operation(self.source, self.meant(node))

    def operations(self) -> Iterator[Operation]:
        """Yield the operations that the statement spells, those around others first."""
        for root in expressions_of(self.statement):
            found = (operation(self.source, node) for node in ast.walk(root))
            yield from (one for one in found if one is not None)

    def meant(self, node: ast.AST) -> ast.AST:
        """Return the expression that a name is bound to at this statement;
        any other node itself.
        """
        seen = 0
        while isinstance(node, ast.Name) and seen < 8:
            found = definition(self.source, node, self.statement)
            if found is None:
                break
            node, seen = found.value, seen + 1
        return node

    def text(self, node: ast.expr) -> str:
        """Return the text of a value where the statement reads it.

        What is computed at an earlier statement, and dear, gets a name there.
        """
        text = self.source.segment(node)
        there = self.source.statement_of(node)
        if there is self.statement or is_cheap(node):
            return text
        if not is_steady(self.source, node):
            return self._named_there(node, there)
        return text

    def closed(self, node: ast.expr) -> str:
        """Return ``text`` so that a method or an operator may follow it."""
        text, operand = self.text(node), self.source.operand(node)
        return operand if text == self.source.segment(node) else text

    def _named_there(self, node: ast.expr, there: ast.stmt) -> str:
        if isinstance(there, ast.Assign) and isinstance(there.targets[0], ast.Name):
            name = self.source.fresh(f"{there.targets[0].id}_input")
        else:
            name = self.source.fresh("before")
        line = self.source.inserted_before(there, (f"{name} = {self._one_line(node)}",))
        if line is None or any(isinstance(one, UNSURE) for one in self.source.around(node)):
            raise NotKnownError
        self.edits += [line, Edit(*self.source.span(node), name)]
        return name

    def twice(self, node: ast.expr, name: str) -> str:
        """Return the text of a value so that it may be written more than once.

        What is dear is named in a line before the statement. Errors: ``NotKnownError`` where it is
        not sure that the statement would compute it, and as its first draw of random numbers.
        """
        if is_cheap(node):
            return self.source.segment(node)
        return self.named(self._one_line(node), name, node)

    def again(self, node: ast.expr, name: str) -> str:
        """Return the text of a value, which an earlier statement may compute, so that it may be
        written more than once and a method may follow it; errors as ``twice``.
        """
        text = self.text(node)
        made = parsed(text)
        if is_cheap(made) and is_closed(made):
            return text
        return self.named(self._one_line(node), name, node)

    def named(self, text: str, name: str, node: ast.expr) -> str:
        """Return a name for a value that a line before the statement computes."""
        around = [*self.source.around(node)]
        is_here = self.statement in around
        inside = around[: around.index(self.statement)] if is_here else []
        if (
            not is_simple(self.statement)
            or any(isinstance(one, UNSURE) for one in inside)
            or self.source.indent_of(self.statement) is None
            or not (is_steady(self.source, node) or (is_here and self._comes_first(node)))
        ):
            raise NotKnownError
        known = [line.partition(" = ") for line in self.lines]
        for one, _, value in known:
            if value == text:
                return one
        chosen = self.source.fresh(name)
        while any(one == chosen for one, _, _ in known):
            chosen += "_"
        self.lines.append(f"{chosen} = {text}")
        return chosen

    def _comes_first(self, node: ast.expr) -> bool:
        """Return whether nothing that may draw numbers runs before it in the statement."""
        start = self.source.span(node)[0]
        calls = [one for one in ast.walk(self.statement) if isinstance(one, ast.Call)]
        ends = [self.source.span(one)[1] for one in calls if not is_steady(self.source, one)]
        return all(end > start for end in ends)

    def _one_line(self, node: ast.expr) -> str:
        text = self.source.segment(node)
        if "\n" not in text and "\r" not in text:
            return text
        return ast.unparse(node) if "#" not in text else self._refused()

    def _refused(self) -> str:
        raise NotKnownError

    def with_operand(self, found: Operation, place: int, text: str) -> str:
        """Return an operation's text with another operand; ``text`` is closed."""
        start, end = self.source.span(found.node)
        first, last = self.source.span(found.args[place])
        before, after = self.source.text[start:first], self.source.text[last:end]
        if before.count("(") > before.count(")") and before.endswith("(") and after.startswith(")"):
            lone = not isinstance(found.node, ast.Call) or (found.is_method and not place)
            if lone:
                before, after = before[:-1], after[1:]
        return f"{before}{text}{after}"

    def replaced(self, node: ast.expr, text: str) -> None:
        """Put ``text`` in the place of a node, in parentheses where it needs them."""
        made = parsed(text)
        parent = self.source.parents[node]
        operators = (ast.BinOp, ast.UnaryOp, ast.Attribute, ast.Compare, ast.Subscript)
        loose = isinstance(made, ast.BinOp | ast.UnaryOp) and isinstance(parent, operators)
        if isinstance(made, ast.BinOp) and isinstance(node, ast.BinOp):
            loose = loose and type(made.op) is not type(node.op)
        start, end = self.source.span(node)
        if loose and not self.is_wrapped(node):
            text = f"({text})"
        self.edits.append(Edit(start, end, text))

    def is_wrapped(self, node: ast.expr) -> bool:
        """Return whether a node stands in parentheses of its own."""
        start, end = self.source.span(node)
        before, after = self.source.text[:start].rstrip(), self.source.text[end:].lstrip()
        of_call = isinstance(self.source.parents[node], ast.Call)
        return before.endswith("(") and after.startswith(")") and not of_call

    def functional(self, name: str) -> str:
        """Return the expression by which the file names a function of ``torch.nn.functional``.

        Errors: ``NotKnownError`` where it imports no part of torch.
        """
        return self.torch(f"nn.functional.{name}")

    def torch(self, name: str) -> str:
        """Return the expression by which the file names a function of ``torch``; errors as
        above.
        """
        found = self.source.spelled(f"torch.{name}")
        if found is None:
            raise NotKnownError
        return found

    def tiny(self, value: str) -> str:
        """Return the smallest normal number of a value's format, as code; ``value`` may be a
        name.
        """
        finfo = self.source.spelled("torch.finfo")
        if finfo is not None and value.replace(".", "").replace("_", "").isalnum():
            return f"{finfo}({value}.dtype).tiny"
        return _TINY.get(self.dtype, "1.2e-38")

    def most(self) -> str:
        """Return a number whose exponential the failing operation's format holds, as code."""
        return _MOST.get(self.dtype, "88")

    def finished(self) -> tuple[Edit, ...]:
        """Return all edits. Errors: ``NotKnownError`` where lines have no place."""
        if not self.lines:
            return tuple(self.edits)
        before = self.source.inserted_before(self.statement, self.lines)
        if before is None:
            raise NotKnownError
        return (before, *self.edits)


def is_steady(source: Source, node: ast.AST) -> bool:
    """Return whether an expression has the same value each time that it is evaluated: it calls
    nothing that draws numbers or keeps a state.
    """
    for one in ast.walk(node):
        if not isinstance(one, ast.Call):
            continue
        full = source.qualified(one.func)
        name = full.rpartition(".")[2] if full.startswith("torch.") else ""
        method = one.func.attr if isinstance(one.func, ast.Attribute) and not full else ""
        if name not in METHODS and method not in METHODS and not is_cheap(one):
            return False
    return True
