"""What a script holds made again, by the statements that gave it its value and the variables that
they read: which line makes numbers of it that are not finite.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import by_torch_alone
from nanstop.prove.forms.mended import Make, made_or_none, mended
from nanstop.pure_code import LEAVES, PURE, leaves_nothing
from nanstop.records import Localization, SourceLine
from nanstop.rewrite.files import FileChange, read
from nanstop.rewrite.source import Source, block_of, source_of
from nanstop.tracing.source.holders import script_frames
from nanstop.tracing.unmade_numbers import lines_that_unmake

_MOST_STATEMENTS = 8
_MOST_ELEMENTS = 1 << 24
_PACKAGES = ("torch", "numpy", "math")
_GIVES = (ast.Assign, ast.AnnAssign, ast.AugAssign)


def variable_unmade_at(name: str, given: SourceLine) -> tuple[SourceLine | None, str]:
    """Return the only line of the script that makes numbers of a variable that are not finite,
    where the statement ``given`` and those before it that it needs are run again; and the guarded
    form of that line with which it is finite, and what was finite as it was, "" for none. Nothing
    where something of it may leave anything behind, or gives another value than the variable has.
    """
    source, variables = source_of(read(given.file)), _variables(given)
    held = variables.get(name)
    if source is None or not isinstance(held, Tensor) or held.numel() > _MOST_ELEMENTS:
        return None, ""
    givers = [one.lineno for one in _givers(source, name)]
    if given.line not in givers:
        return None, ""
    place = givers.index(given.line)
    make = _making(source, given.file, _givers(source, name)[place], name, variables)
    if make is None or not _are_alike(made_or_none(make), [held]):
        return None, ""
    found = lines_that_unmake(make)
    if not found.is_bad or len(found.makers) != 1:
        return None, ""
    ((line, maker),) = found.makers.items()

    def changed(change: FileChange) -> Make | None:
        new = source_of(change.after)
        again = _givers(new, name) if new is not None else []
        if new is None or place >= len(again):
            return None
        return _making(new, change.file, again[place], name, variables)

    return line, mended(line, maker, make, changed, spelled=())


def with_maker(found: Localization) -> Localization:
    """Return a failure with the line that makes so what a variable of the script holds, where the
    failure goes back to that.
    """
    held = bool(found.held_in) and found.held_at is not None
    name, given = (found.held_in, found.held_at) if held else (found.culprit, found.made)
    if not name or given is None or not (held or found.made_before):
        return found
    line, mended_as = variable_unmade_at(name, given)
    return replace(found, unmade_at=line, mended_as=mended_as)


def _are_alike(made: list[Tensor], held: list[Tensor]) -> bool:
    with by_torch_alone():
        return len(made) == len(held) and all(map(_is_same, made, held))


def _is_same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    return bool(torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True).all())


def _variables(given: SourceLine) -> Mapping[str, Any]:
    """Return the variables that a statement of the script reads, as they are now."""
    for frame, _ in script_frames():
        code = frame.f_code
        if code.co_filename == given.file and code.co_name == given.function:
            return {**frame.f_globals, **frame.f_locals}
    return {}


def _givers(source: Source, name: str) -> list[ast.stmt]:
    """Return the statements that give a variable its value, in their order."""
    bound = [one for one in source.stored.get(name, []) if isinstance(one, ast.Name)]
    return sorted({source.statement_of(one) for one in bound}, key=lambda one: one.lineno)


def _making(
    source: Source, file: str, statement: ast.stmt, name: str, variables: Mapping[str, Any]
) -> Make | None:
    """Return what runs the statement that gave a variable its value again, and those before it
    whose variables have been given other values since; None where that may leave something behind.
    """
    needed = _needed(source, statement, variables)
    if not needed or not all(_leaves_nothing(one, variables) for one in needed):
        return None
    code = compile(ast.Module(needed, []), file, "exec", dont_inherit=True)

    def make() -> Any:
        space = dict(variables)
        exec(code, space)
        return space[name]

    return make


def _needed(
    source: Source, statement: ast.stmt, variables: Mapping[str, Any]
) -> list[ast.stmt] | None:
    scope, found, pending = source.scope_of(statement), list[ast.stmt](), [statement]
    while pending:
        one = pending.pop()
        if one in found:
            continue
        found.append(one)
        if not isinstance(one, _GIVES) or len(found) > _MOST_STATEMENTS:
            return None
        for name in _read(one):
            givers = [g for g in _givers(source, name) if source.scope_of(g) is scope]
            if not givers or (name in variables and len(givers) == 1 and givers[0] is not one):
                continue
            before = [g for g in givers if g.lineno < one.lineno]
            if not before or not _has_run(source, before[-1], statement):
                return None
            pending.append(before[-1])
    return sorted(found, key=lambda one: one.lineno)


def _has_run(source: Source, earlier: ast.stmt, later: ast.stmt) -> bool:
    """Return whether a statement has surely run, once, before another one."""
    inside = [later, *source.around(later)]
    return any(earlier in block_of(outer, inner) for inner, outer in pairwise(inside))


def _read(statement: ast.stmt) -> set[str]:
    names = [one for one in ast.walk(statement) if isinstance(one, ast.Name)]
    read = {one.id for one in names if isinstance(one.ctx, ast.Load)}
    is_own = isinstance(statement, ast.AugAssign)
    return read | {one.id for one in names if is_own and isinstance(one.ctx, ast.Store)}


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, (ast.AnnAssign, ast.AugAssign)) else []


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _leaves_nothing(statement: ast.stmt, variables: Mapping[str, Any]) -> bool:
    """Return whether a statement gives variables values, and what it calls does nothing else."""
    targets = _targets(statement)
    names = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
    calls = (one for one in ast.walk(statement) if isinstance(one, ast.Call))
    return all(map(_name, names)) and all(_is_harmless(one.func, variables) for one in calls)


def _is_harmless(func: ast.expr, variables: Mapping[str, Any]) -> bool:
    if isinstance(func, ast.Name):
        function = variables.get(func.id, getattr(builtins, func.id, None))
        if isinstance(function, FunctionType):
            return leaves_nothing(function, *_PACKAGES) or _is_of_package(function)
        return function in PURE or _is_of_package(function)
    if not isinstance(func, ast.Attribute):
        return False
    root = func.value
    while isinstance(root, ast.Attribute):
        root = root.value
    module = variables.get(_name(root)) if _name(root) else None
    if isinstance(module, ModuleType):
        return module.__name__.partition(".")[0] in _PACKAGES
    return not func.attr.endswith("_") and func.attr not in LEAVES


def _is_of_package(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] in _PACKAGES
