"""A training script as a tree, and the script that a rewrite makes of it, line by line."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Place = tuple[int, int, int, int]
"""Where an expression stands in the source: its first line and column, its last."""
Change = Callable[[ast.expr], "ast.expr | None"]
"""What is put in the place of an expression; None leaves it."""


@dataclass(frozen=True)
class Script:
    """A script. ``tensors``: which operands of ``/``, ``**`` and ``@`` were tensors as it ran."""

    source: str
    tensors: Mapping[Place, tuple[bool, bool]] = field(default_factory=dict)

    def tree(self) -> ast.Module:
        """Return the parsed source, whose nodes know their lines."""
        return ast.parse(self.source)

    def of_tensors(self, node: ast.AST) -> tuple[bool, bool]:
        """Return whether the left and the right operand are tensors; unknown means no."""
        return self.tensors.get(place(node), (False, False))


@dataclass(frozen=True)
class Rewrite:
    """A way to spell a script. ``apply`` returns the new tree, or None where nothing changes.

    ``rows``: what becomes of the rows of a batch. ``keeps_numbers``: the losses that are printed
    stay the same. ``added``: the name under which a module of the script's own holds the model.
    ``modules``: classes of torch that the script itself now calls in the place of functions.
    """

    name: str
    apply: Callable[[Script], ast.Module | None]
    rows: Literal["same", "reversed"] = "same"
    keeps_numbers: bool = True
    added: str = ""
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Variant:
    """A script spelled anew. ``lines``: of each of its lines, those of the script it was."""

    rewrite: Rewrite
    source: str
    lines: Mapping[int, frozenset[int]]
    renamed: Mapping[str, str]
    """Attributes of its modules, the new name first."""


def place(node: ast.AST) -> Place:
    """Return where an expression stands. Errors: ``AttributeError`` for a node without a place."""
    last = (node.end_lineno or 0, node.end_col_offset or 0)  # type: ignore[attr-defined]
    return (node.lineno, node.col_offset, *last)  # type: ignore[attr-defined]


def variant_of(script: Script, rewrite: Rewrite) -> Variant | None:
    """Return the script under a rewrite, or None where it changes nothing."""
    tree = rewrite.apply(script)
    if tree is None:
        return None
    ast.fix_missing_locations(tree)
    source = ast.unparse(tree) + "\n"
    renamed = getattr(tree, "renamed", {})
    return Variant(rewrite, source, _lines(tree, ast.parse(source)), renamed)


def _lines(tree: ast.Module, anew: ast.Module) -> dict[int, frozenset[int]]:
    """Return the lines of each new line: both trees have the same nodes in the same order."""
    found: dict[int, set[int]] = {}
    for old, new in zip(ast.walk(tree), ast.walk(anew), strict=True):
        if isinstance(new, ast.stmt | ast.expr):
            assert isinstance(old, ast.stmt | ast.expr), ast.dump(new)
            found.setdefault(new.lineno, set()).add(old.lineno)
    return {line: frozenset(lines) for line, lines in found.items()}


# ---- building


def expression(template: str, at: ast.AST, **parts: ast.expr) -> ast.expr:
    """Return the expression of a template whose names in capitals are replaced by ``parts``."""
    (only,) = statements(template, at, **parts)
    assert isinstance(only, ast.Expr)
    return only.value


def statements(template: str, at: ast.AST, **parts: ast.expr) -> list[ast.stmt]:
    """Return the statements of a template; all of them stand on the line of ``at``."""
    tree = ast.parse(template)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.keyword | ast.arg):
            ast.copy_location(node, at)
    return _Filling(parts).visit(tree).body


class _Filling(ast.NodeTransformer):
    def __init__(self, parts: Mapping[str, ast.expr]) -> None:
        self.parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id not in self.parts:
            return node
        part = copy.deepcopy(self.parts[node.id])
        if isinstance(node.ctx, ast.Store) and isinstance(part, ast.Name):
            part.ctx = ast.Store()
        return part


class _Each(ast.NodeTransformer):
    def __init__(self, change: Change) -> None:
        self.change, self.num_changed = change, 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        made = self.change(node) if isinstance(node, ast.expr) else None
        self.num_changed += made is not None
        return made if made is not None else node


def each_expression(tree: ast.Module, change: Change) -> ast.Module | None:
    """Change every expression of a tree, from within; None where none was changed."""
    walked = _Each(change)
    walked.visit(tree)
    return tree if walked.num_changed else None


def at_top(tree: ast.Module, template: str) -> None:
    """Put statements between the imports of a script and what follows them."""
    after = [
        number
        for number, node in enumerate(tree.body)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    first = after[-1] + 1 if after else 0
    origin = ast.Pass(lineno=1, col_offset=0, end_lineno=1, end_col_offset=0)
    tree.body[first:first] = statements(template, origin)


def blocks(tree: ast.AST) -> Iterable[list[ast.stmt]]:
    """Return every list of statements in a tree."""
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                yield block


def called(node: ast.AST) -> str:
    """Return the dotted name of what an expression calls, "" for anything else."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def is_simple(node: ast.expr) -> bool:
    """Return whether an expression costs nothing to write twice."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.Slice, ast.Tuple)
    contexts = (ast.expr_context, ast.UnaryOp, ast.unaryop)
    return all(isinstance(one, kinds + contexts) for one in ast.walk(node))
