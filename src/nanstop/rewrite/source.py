"""A file of Python as text and as a tree, and edits of it that leave all else byte for byte."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from types import CodeType
from typing import Any, TypeVar

from nanstop.frozen import frozen

N = TypeVar("N", bound=ast.AST)

Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
SCOPES = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
UNSURE = (ast.Lambda, ast.IfExp, ast.BoolOp, ast.comprehension, *COMPREHENSIONS)
"""What a statement may run never, or more than once."""

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n|$)")
_CLOSED = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Tuple, ast.List)


@frozen
class Edit:
    """The characters of a text from ``start`` up to ``end`` become ``text``."""

    start: int
    end: int
    text: str


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return ``text`` with the edits made, in the order of the text; equal ones count once."""
    parts, done = [], 0
    for edit in sorted(dict.fromkeys(edits), key=lambda one: (one.start, one.end)):
        parts += [text[done : edit.start], edit.text]
        done = edit.end
    return "".join((*parts, text[done:]))


def apart(edits: Iterable[Edit], others: Iterable[Edit]) -> list[Edit]:
    """Return the edits that change nothing of what ``others`` do."""
    taken = list(others)
    return [
        one
        for one in edits
        if one in taken or not any(one.start < o.end and o.start < one.end for o in taken)
    ]


class Source:
    """The text of a file with its tree. Errors: ``SyntaxError`` for what is no Python."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._lines = [match[0] for match in _LINE.finditer(text)]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    @cached_property
    def parents(self) -> Mapping[ast.AST, ast.AST]:
        """Of each node, the one that it belongs to."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name and attribute that the file speaks of."""
        found = {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}
        found |= {node.attr for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        return frozenset(found | {n.arg for n in ast.walk(self.tree) if isinstance(n, ast.arg)})

    @cached_property
    def stored(self) -> Mapping[str, list[ast.Name | ast.Attribute]]:
        """Where the file binds each name and attribute, by how it is spelled."""
        found: dict[str, list[ast.Name | ast.Attribute]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.setdefault(ast.unparse(node), []).append(node)
        return found

    @cached_property
    def imported(self) -> Mapping[str, str]:
        """What the file's imports call what: ``F`` is ``torch.nn.functional``.

        A name that the file also binds otherwise is left out.
        """
        found = self._all_imported
        return {name: full for name, full in found.items() if name not in self._bound}

    def is_value(self, node: ast.expr) -> bool:
        """Return whether an expression does not begin with what the file imports, or has from
        ``import *``: a module's function is no method of a value.
        """
        while isinstance(node, ast.Attribute):
            node = node.value
        if not isinstance(node, ast.Name):
            return True
        return node.id in self._bound and node.id not in self._all_imported

    @cached_property
    def _bound(self) -> frozenset[str]:
        nodes = list(ast.walk(self.tree))
        bound = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        return frozenset(bound | {node.arg for node in nodes if isinstance(node, ast.arg)})

    @cached_property
    def _all_imported(self) -> Mapping[str, str]:
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    found[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom):
                package = f"{'.' * node.level}{node.module or ''}"
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{package}.{alias.name}"
        return found

    def qualified(self, node: ast.AST) -> str:
        """Return ``torch.nn.functional.softmax`` of ``F.softmax``; "" for what is not imported."""
        if isinstance(node, ast.Name):
            return self.imported.get(node.id, "")
        if isinstance(node, ast.Attribute):
            base = self.qualified(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def spelled(self, full: str) -> str | None:
        """Return the expression by which the file names ``full`` (``torch.nn.functional``, say)
        through what it imports; None where it imports no part of it.
        """
        known = [(len(one), name, one) for name, one in self.imported.items()]
        fits = [one for one in known if full == one[2] or full.startswith(one[2] + ".")]
        _, name, found = max(fits, default=(0, None, ""))
        return f"{name}{full[len(found) :]}" if name is not None else None

    def position(self, line: int, column: int) -> int:
        """Return where in the text a line (from 1) and a column in UTF-8 bytes are."""
        text = self._lines[line - 1]
        if not text.isascii():
            column = len(text.encode()[:column].decode(errors="ignore"))
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt | ast.keyword | ast.arg) -> tuple[int, int]:
        """Return where a node begins and ends in the text."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.position(node.lineno, node.col_offset)
        return start, self.position(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.expr | ast.stmt | ast.keyword) -> str:
        """Return the text of a node, without parentheses around it."""
        start, end = self.span(node)
        return self.text[start:end]

    def operand(self, node: ast.expr) -> str:
        """Return the text of a node so that a method or an operator may follow it."""
        text = self.segment(node)
        return text if is_closed(node) else f"({text})"

    def line(self, number: int) -> str:
        """Return a line (from 1) without its end; "" beyond the last."""
        return self._lines[number - 1].rstrip("\r\n") if 0 < number <= len(self._lines) else ""

    def newline(self, number: int) -> str:
        """Return how a line ends."""
        text = self._lines[number - 1]
        return text[len(text.rstrip("\r\n")) :] or "\n"

    def indent_of(self, statement: ast.stmt) -> str | None:
        """Return the space before a statement; None where another stands on its line before it."""
        start = self._starts[statement.lineno - 1]
        before = self.text[start : self.span(statement)[0]]
        return None if before.strip() else before

    def inserted_before(self, statement: ast.stmt, lines: Iterable[str]) -> Edit | None:
        """Return an edit that puts lines before a statement, indented as it; None where it
        shares its line.
        """
        indent = self.indent_of(statement)
        if indent is None:
            return None
        start, end = self._starts[statement.lineno - 1], self.newline(statement.lineno)
        return Edit(start, start, "".join(f"{indent}{line}{end}" for line in lines))

    def inserted_after(self, statement: ast.stmt, lines: Iterable[str]) -> Edit | None:
        """Return an edit that puts lines after a statement, indented as it; None where it shares
        its line.
        """
        indent, last = self.indent_of(statement), statement.end_lineno or statement.lineno
        after = self.text[self.span(statement)[1] : self._starts[last]].partition("#")[0]
        if indent is None or after.strip():
            return None
        start, end = self._starts[last], self.newline(last)
        first = "" if self._lines[last - 1].endswith(("\r", "\n")) else end
        return Edit(start, start, first + "".join(f"{indent}{line}{end}" for line in lines))

    def statement_at(self, line: int) -> ast.stmt | None:
        """Return the innermost statement that a line belongs to."""
        found: ast.stmt | None = None
        for node in nodes_around(self.tree, line, ast.stmt):
            if found is None or node.lineno >= found.lineno:
                found = node
        return found

    def statements_at(self, line: int) -> tuple[ast.stmt, ...]:
        """Return the innermost statements that a line belongs to: several with ``;`` between."""
        last = self.statement_at(line)
        if last is None:
            return ()
        beside = block_of(self.parents[last], last)
        return tuple(one for one in beside if one.lineno <= line <= (one.end_lineno or line))

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement around a node."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def scope_of(self, node: ast.AST) -> Scope:
        """Return the function, or the module, whose names a node reads."""
        node = self.parents[node]
        while not isinstance(node, SCOPES):
            node = self.parents[node]
        return node

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node belongs to, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def readers_of(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """Yield the statements after one, of the same block, that read what it binds, or what they
        make of it.
        """
        names, after = _bound(statement), False
        for other in block_of(self.parents[statement], statement):
            if after and names & {n.id for n in ast.walk(other) if isinstance(n, ast.Name)}:
                yield other
                names |= _bound(other)
            after = after or other is statement

    def fresh(self, name: str) -> str:
        """Return a name that the file does not use yet."""
        number, found = 1, name
        while found in self.names or found in self.imported:
            number += 1
            found = f"{name}{number}"
        return found


def source_of(text: str | None) -> Source | None:
    """Return a file's source; None where there is no text, or none of Python."""
    if text is None:
        return None
    try:
        return Source(text)
    except (SyntaxError, ValueError, RecursionError):
        return None


def _bound(statement: ast.stmt) -> set[str]:
    nodes = ast.walk(statement)
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def parsed(text: str) -> ast.expr:
    """Return an expression of its own, which may be of several lines; errors as ``Source``."""
    return ast.parse(f"(\n{text}\n)", mode="eval").body


def is_closed(node: ast.expr) -> bool:
    """Return whether a method or an operator may follow an expression without parentheses."""
    return isinstance(node, _CLOSED) or isinstance(getattr(node, "value", None), str)


def nodes_around(tree: ast.AST, line: int, *kinds: type[N]) -> list[N]:
    """Return the statements and expressions of some kinds that a line of a file lies in."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        and isinstance(node, ast.stmt | ast.expr)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]


def block_of(parent: ast.AST, statement: ast.AST) -> list[ast.stmt]:
    """Return the statements that one stands among in ``parent``, none where it is in no block."""
    blocks = (getattr(parent, name, None) for name in ("body", "orelse", "finalbody"))
    return next((one for one in blocks if isinstance(one, list) and statement in one), [])


def expressions_of(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yield the expressions that a statement is made of, not those of statements inside it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.withitem):
            yield child.context_expr


Span = tuple[tuple[int | None, int | None], tuple[int | None, int | None]]
"""Lines from 1, and columns in bytes, of the beginning and of the end."""


def span_at(code: CodeType, instruction: int) -> Span | None:
    """Return where the expression begins and ends that code evaluates at an instruction (-1: not
    known); None where Python does not know it (before 3.11).
    """
    places: Any = getattr(code, "co_positions", None)
    if places is None or instruction < 0:
        return None
    line, last, column, end = next(islice(places(), instruction // 2, None))
    return (line, column), (last, end)


def span_of(node: ast.expr) -> Span:
    """Return where an expression begins and ends."""
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def spelled(tree: ast.AST, span: Span, number: int) -> tuple[str, ...]:
    """Return, of the operation at a place that is given ``number`` operands, the names and
    attributes that it spells as these, "" for any other; () where there is none that does.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and span_of(node) == span:
            operands = _operands(node, number)
            named = [isinstance(one, ast.Name | ast.Attribute) for one in operands]
            return tuple(ast.unparse(o) if n else "" for o, n in zip(operands, named, strict=True))
    return ()


def _operands(node: ast.expr, number: int) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Subscript):
        return [node.value, node.slice]
    if not isinstance(node, ast.Call):
        return []
    if isinstance(node.func, ast.Attribute) and len(node.args) < number:
        return [node.func.value, *node.args]
    return node.args
