"""What a change of a file puts in the place of which operations, as expressions."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from nanstop.rewrite.operations import Operation, operation, same
from nanstop.rewrite.source import Source


@dataclass(frozen=True, slots=True)
class Replaced:
    """``by``: of each operation that is replaced, by its node, the expression in its place, as the
    new file has it. ``apart``: statements that are in a block without autocast now. ``named``: what
    the lines that are new give a name to. ``remade``: constructors that have other arguments now,
    by what the file calls what they make. ``logs``: of values that a variable was given, what their
    logarithms are called now, which ``by`` has; ``numbers``: of those logarithms, the variables.
    """

    by: Mapping[ast.expr, ast.expr]
    apart: frozenset[ast.AST]
    named: Mapping[str, ast.expr]
    remade: Mapping[str, ast.Call]
    logs: Mapping[ast.expr, str]
    numbers: Mapping[str, str]

    def constructed(self, source: Source, node: ast.expr) -> ast.Call | None:
        """Return how the module is made that a node calls as an operation; None for what calls
        none. It has no weights.
        """
        found = operation(source, node)
        if found is None or found.made_by is None or not isinstance(node, ast.Call):
            return None
        return self.remade.get(ast.unparse(node.func), found.made_by)


def replaced(old: Source, new: Source) -> Replaced | None:
    """Return what becomes of the operations of a file in a changed one; None where the files
    differ in something else as well.
    """
    search = _Search(old, new)
    if search.differ(old.tree, new.tree):
        return None
    by = dict(search.by)
    for node in ast.walk(old.tree) if search.remade else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in search.remade:
            by.setdefault(node, node)
    return Replaced(
        by, frozenset(search.apart), search.named, search.remade, search.logs, search.numbers
    )


def log_name(name: str) -> str:
    """Return what the logarithm of a variable is called, unless the file has that name already."""
    return f"log_{name}"


class _Search:
    def __init__(self, old: Source, new: Source) -> None:
        self._old, self._new = old, new
        self.by: dict[ast.expr, ast.expr] = {}
        self.apart: set[ast.AST] = set()
        self.named: dict[str, ast.expr] = {}
        self.remade: dict[str, ast.Call] = {}
        self.logs: dict[ast.expr, str] = {}
        stems = {log_name(name): name for name in old.names}
        found = {one: stems.get(one.rstrip("0123456789"), "") for one in new.names - old.names}
        self.numbers = {one: name for one, name in found.items() if name}

    def differ(self, old: ast.AST, new: ast.AST, *, inside: bool = False) -> bool:
        """Return whether two trees differ beyond what is kept as replaced.

        ``inside``: whether they belong to an operation, which is replaced where an operand of it
        has become something else.
        """
        before, after = _operation(self._old, old), _operation(self._new, new)
        if before is not None and not _are_alike(before, after):
            if inside or not isinstance(new, ast.expr):
                return True
            self.by[before.node] = new
            return False
        if type(old) is not type(new):
            return True
        if isinstance(old, ast.Assign) and isinstance(new, ast.Assign) and self._is_log(old, new):
            return False
        inside = inside or before is not None
        parts = [
            self._values_differ(getattr(old, name), getattr(new, name), inside=inside)
            for name in old._fields
        ]
        if before is None or after is None or not any(parts):
            return any(parts) and not self._is_remade(old, new)
        self.by[before.node] = after.node
        return False

    def _is_log(self, old: ast.Assign, new: ast.Assign) -> bool:
        """Return whether a variable was given a value of which another one has the logarithm now,
        and note it; not where that is the logarithm of the same expression.
        """
        target, name = new.targets[0], old.targets[0]
        if not isinstance(target, ast.Name) or not isinstance(name, ast.Name):
            return False
        if self.numbers.get(target.id) != name.id:
            return False
        found = operation(self._new, new.value)
        if found is None or found.name != "log" or not same(found.operand, old.value):
            self.by[old.value] = new.value
            self.logs[old.value] = target.id
        return True

    def _is_remade(self, old: ast.AST, new: ast.AST) -> bool:
        if not isinstance(old, ast.Assign) or not isinstance(new, ast.Assign):
            return False
        same = [*map(ast.dump, old.targets)] == [*map(ast.dump, new.targets)]
        if not same or not isinstance(new.value, ast.Call) or len(new.targets) != 1:
            return False
        self.remade[ast.unparse(new.targets[0])] = new.value
        return self._new.qualified(new.value.func).startswith("torch.nn.")

    def _values_differ(self, old: Any, new: Any, *, inside: bool) -> bool:
        if isinstance(old, list) and isinstance(new, list):
            before: list[Any] = old
            in_blocks = self._in_new_blocks(before, cast("list[Any]", new))
            after = self._without_new_names([node for node, _ in in_blocks])
            pairs = zip(before, after, strict=False)
            found = [self._values_differ(*pair, inside=inside) for pair in pairs]
            apart = {id(node) for node, is_apart in in_blocks if is_apart}
            self.apart |= {b for b, a in zip(before, after, strict=False) if id(a) in apart}
            return len(before) != len(after) or any(found)
        if isinstance(old, ast.AST) and isinstance(new, ast.AST):
            return self.differ(old, new, inside=inside)
        return old != new

    def _in_new_blocks(self, before: list[Any], nodes: list[Any]) -> list[tuple[Any, bool]]:
        """Return the nodes, what is in new blocks without autocast in their place, and of each
        whether it is in one.
        """
        old = {ast.dump(node) for node in before if isinstance(node, ast.With)}
        found: list[tuple[Any, bool]] = []
        for node in nodes:
            is_new = isinstance(node, ast.With) and ast.dump(node) not in old
            if is_new and self._leaves_autocast(node.items):
                found += ((one, True) for one in node.body)
            else:
                found.append((node, False))
        return found

    def _leaves_autocast(self, items: list[ast.withitem]) -> bool:
        call = items[0].context_expr
        if len(items) != 1 or not isinstance(call, ast.Call):
            return False
        given = [(one.arg, ast.unparse(one.value)) for one in call.keywords]
        is_off = given == [("enabled", "False")]
        return is_off and self._new.qualified(call.func) == "torch.autocast"

    def _without_new_names(self, nodes: list[Any]) -> list[Any]:
        """Return the nodes but for those that give a new name, which are kept. A name that is given
        once more is another one from there on.
        """
        found: list[Any] = []
        again: dict[str, str] = {}
        for node in nodes:
            for name in ast.walk(node) if again else ():
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load):
                    name.id = again.get(name.id, name.id)
            target = self._new_name(node)
            if target is None:
                found.append(node)
                continue
            if target in self.named:
                again[target] = f"__{target}_{len(self.named)}"
            self.named[again.get(target, target)] = node.value
        return found

    def _new_name(self, node: object) -> str | None:
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return None
        target = node.targets[0]
        known = self._old.names | self.numbers.keys()
        is_new = isinstance(target, ast.Name) and target.id not in known
        return target.id if is_new and isinstance(target, ast.Name) else None


def _operation(source: Source, node: ast.AST) -> Operation | None:
    found = operation(source, node)
    return found if found is not None and found.name.islower() else None  # no class of modules


def _are_alike(old: Operation, new: Operation | None) -> bool:
    if new is None or (old.name, old.is_method) != (new.name, new.is_method):
        return False
    return (len(old.args), {*old.keywords}) == (len(new.args), {*new.keywords})


def operations_in_order(source: Source, statement: ast.stmt) -> Iterator[Operation]:
    """Yield the operations of a statement, each after what it reads."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr | ast.withitem):
            yield from _in_order(source, child)


def _in_order(source: Source, node: ast.AST) -> Iterator[Operation]:
    for child in ast.iter_child_nodes(node):
        yield from _in_order(source, child)
    found = operation(source, node)
    if found is not None:
        yield found


def copied(node: ast.expr) -> ast.expr:
    """Return an expression as a tree of its own."""
    return ast.parse(ast.unparse(node), mode="eval").body
