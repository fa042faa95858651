"""Numbers that a loop carries from round to round, a forward algorithm's or a scaling's, carried as
their logarithms: each variable of them gets another that holds its logarithm.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from nanstop.rewrite.draft import Draft, NotKnownError
from nanstop.rewrite.forms.log_of import closed, log_as_it_is, log_of
from nanstop.rewrite.forms.log_space import rewrite_in_log_space
from nanstop.rewrite.operations import is_cheap, operation
from nanstop.rewrite.replaced import log_name
from nanstop.rewrite.source import LOOPS, Edit, Source

_JOINED = {ast.Mult: " + ", ast.Div: " - "}
"""What joins logarithms where a variable is multiplied, or divided, in place."""


def carried_edits(
    source: Source, statements: Iterable[ast.stmt], dtype: str, *, of_matrices: bool
) -> tuple[Edit, ...]:
    """Return the edits that have a loop carry the logarithm of what one of the statements binds;
    empty where none are known. ``of_matrices``: see ``Draft``.
    """
    for statement in statements:
        draft = Draft(source, statement, dtype, of_matrices=of_matrices)
        with suppress(NotKnownError):
            if _is_carried(draft):
                return tuple(draft.edits)
    return ()


def _is_carried(draft: Draft) -> bool:
    """Return whether what the statement binds is carried by a loop and could be written as its
    logarithm throughout its function; the draft holds that. Errors: ``NotKnownError``.
    """
    source, statement = draft.source, draft.statement
    name, scope = _bound_by(statement), source.scope_of(statement)
    loops = (one for one in source.around(statement) if isinstance(one, LOOPS))
    if not name or not any(source.scope_of(one) is scope for one in loops):
        return False
    made = {node.id: _assignments(source, scope, node.id) for node in _names(scope)}
    logs = _Logs(source, {key: found for key, found in made.items() if found})
    logs.carry(name)
    draft.log_of_variable = logs.of
    while True:
        known = [*logs.names]
        edits = [one for key in known for one in _written_as_logs(draft, logs, key)]
        edits += [one for key in known for one in _read_as_logs(draft, scope, logs, key)]
        if [*logs.names] == known:
            break
    draft.edits += dict.fromkeys(edits)
    places = sorted((one.start, one.end) for one in draft.edits)
    if any(first[1] > second[0] for first, second in pairwise(places)):
        raise NotKnownError
    return True


class _Logs:
    """The variables that are carried as logarithms, and what those are called (``names``).
    ``made``: the assignments of each variable that nothing else binds.
    """

    def __init__(self, source: Source, made: Mapping[str, list[ast.stmt]]) -> None:
        self.names: dict[str, str] = {}
        self.made = made
        self._source = source

    def carry(self, variable: str) -> str:
        if variable not in self.made:
            raise NotKnownError
        self.names[variable] = self._source.fresh(log_name(variable))
        return self.names[variable]

    def of(self, variable: str) -> str | None:
        """Return what the logarithm of a variable is called; it is carried from then on if it is
        made of one that is, or is the exponential of something costly.
        """
        if variable in self.names:
            return self.names[variable]
        is_carried = any(map(self._is_carried, self.made.get(variable, ())))
        return self.carry(variable) if is_carried else None

    def are_read_by(self, node: ast.AST) -> bool:
        return any(one.id in self.names for one in _names(node))

    def _is_carried(self, statement: ast.stmt) -> bool:
        found = operation(self._source, _value(statement))
        is_costly = found is not None and found.name == "exp" and not is_cheap(found.operand)
        return is_costly or self.are_read_by(_value(statement))


def _written_as_logs(draft: Draft, logs: _Logs, variable: str) -> Iterator[Edit]:
    """Yield what makes assignments of a variable those of its logarithm."""
    name = logs.names[variable]
    for statement in logs.made[variable]:
        at, value = replace(draft, statement=statement, lines=[], edits=[]), _value(statement)
        text = log_of(at, value)
        is_plain = isinstance(statement, ast.Assign) and statement is draft.statement
        if text is None and (is_plain or logs.are_read_by(value)):
            raise NotKnownError
        text = text if text is not None else log_as_it_is(at, value)
        if isinstance(statement, ast.AugAssign):
            joint = _JOINED.get(type(statement.op))
            if joint is None:
                raise NotKnownError
            text = f"{name}{joint}{closed(text) if joint == ' - ' else text}"
        yield from at.finished()
        yield Edit(*draft.source.span(statement), f"{name} = {text}")


def _read_as_logs(draft: Draft, scope: ast.AST, logs: _Logs, variable: str) -> Iterator[Edit]:
    """Yield what makes of other statements that read a variable ones that read its logarithm."""
    source = draft.source
    written = {id(one) for key in logs.names for one in logs.made[key]}
    reads = [node for node in _names(scope) if node.id == variable and _is_read(node)]
    statements = {id(one): one for one in map(source.statement_of, reads)}
    for key, statement in statements.items():
        if key in written:
            continue
        at = replace(draft, statement=statement, lines=[], edits=[])
        rewrite_in_log_space(at)
        for node in (one for one in reads if source.statement_of(one) is statement):
            if source.scope_of(node) is not scope:
                raise NotKnownError
            start, end = source.span(node)
            if not any(one.start <= start and end <= one.end for one in at.edits):
                whole, log = _product_around(at, node)
                at.replaced(whole, f"{draft.torch('exp')}({log})")
        yield from at.finished()


def _product_around(draft: Draft, node: ast.expr) -> tuple[ast.expr, str]:
    """Return the largest product that a variable is a factor of, or a part of one, all of whose
    factors have logarithms, and its own; or the variable itself.
    """
    whole, log = node, log_of(draft, node) or ""
    for around in draft.source.around(node):
        if not isinstance(around, ast.expr):
            break
        found = operation(draft.source, around)
        is_product = found is not None and found.name == "mul"
        text = _log_of_product(draft, around) if is_product else None
        if is_product and text is None:
            break
        whole, log = (around, text) if isinstance(around, ast.expr) and text else (whole, log)
    return whole, log


def _log_of_product(draft: Draft, node: ast.expr) -> str | None:
    found = operation(draft.source, node)
    if found is None or found.name != "mul":
        return log_of(draft, node)
    logs = [_log_of_product(draft, one) for one in found.args]
    known = [one for one in logs if one is not None]
    return " + ".join(known) if len(known) == len(logs) == 2 else None


def _assignments(source: Source, scope: ast.AST, name: str) -> list[ast.stmt]:
    """Return the statements of a function that bind a variable; none where one of them does
    anything else, or something else binds it too.
    """
    bound = [node for node in _names(scope) if node.id == name and not _is_read(node)]
    found = [source.statement_of(node) for node in bound]
    given = {one.arg for one in ast.walk(scope) if isinstance(one, ast.arg)}
    others = (ast.Global, ast.Nonlocal)
    declared = [n for one in ast.walk(scope) if isinstance(one, others) for n in one.names]
    is_alone = all(_bound_by(one) == name and source.scope_of(one) is scope for one in found)
    return found if is_alone and name not in {*given, *declared} else []


def _bound_by(statement: ast.stmt) -> str:
    """Return the one variable that a statement binds, and does nothing else; "" for none."""
    target = None
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign):
        target = statement.target
    return target.id if isinstance(target, ast.Name) else ""


def _value(statement: ast.stmt) -> ast.expr:
    assert isinstance(statement, ast.Assign | ast.AugAssign)
    return statement.value


def _names(node: ast.AST) -> list[ast.Name]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Name)]


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)
