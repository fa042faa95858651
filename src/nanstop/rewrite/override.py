"""What a script can say in place of a line in a library's file: the function, written anew."""

from __future__ import annotations

import ast
import builtins
import textwrap
from collections.abc import Iterator

from nanstop.rewrite.source import Source


def override(before: str, after: str, module: str) -> str | None:
    """Return code for a user's script that puts a changed function in the place of a library's.

    ``module``: the library's module, as it is imported. None where the change is not within one
    function, or the function cannot stand elsewhere (``super()`` without arguments).
    """
    old, new = Source(before), Source(after)
    changed = _changed_function(old, new)
    if changed is None:
        return None
    owner = new.parents.get(changed)
    inside = owner.name if isinstance(owner, ast.ClassDef) else None
    if not isinstance(owner, ast.ClassDef | ast.Module) or _needs_its_class(changed):
        return None
    names = sorted(_read(changed) & _bound(new) | ({inside} if inside else set()))
    start = new.position(changed.lineno, 0)
    text = textwrap.dedent(new.text[start : new.span(changed)[1]]).replace("\r\n", "\n")
    said = {name: statement for name, statement in _imports(new) if name in names}
    own = [name for name in names if name not in said]
    lines = [*said.values(), *([f"from {module} import {', '.join(own)}"] if own else [])]
    if inside is None:
        lines += [f"import {module}"]
        placed = f"{module}.{changed.name} = {changed.name}"
    else:
        placed = f"{inside}.{changed.name} = {changed.name}"
    return "\n".join((*lines, "", text.rstrip(), "", placed))


def _changed_function(old: Source, new: Source) -> ast.FunctionDef | None:
    before = {_path(old, node): ast.dump(node) for node in _functions(old)}
    found = [
        node
        for node in _functions(new)
        if isinstance(new.parents[node], ast.ClassDef | ast.Module)
        and before.get(_path(new, node)) != ast.dump(node)
    ]
    return found[0] if len(found) == 1 and not found[0].decorator_list else None


def _functions(source: Source) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)]


def _path(source: Source, node: ast.FunctionDef) -> str:
    around = [getattr(one, "name", "") for one in source.around(node)]
    return ".".join((*around, node.name))


def _needs_its_class(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "super"
        and not node.args
        for node in ast.walk(function)
    )


def _read(function: ast.FunctionDef) -> set[str]:
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    stored |= {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    return {node.id for node in nodes} - stored - set(dir(builtins))


def _imports(source: Source) -> Iterator[tuple[str, str]]:
    """Yield each name that the module's imports bind, once and always, with a statement that does
    so in any file.
    """
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            places = [(one, f"import {_aliased(one)}") for one in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            places = [(one, f"from {node.module} import {_aliased(one)}") for one in node.names]
        else:
            continue
        for one, statement in places:
            name = one.asname or one.name.partition(".")[0]
            if name in source.imported:
                yield name, statement


def _aliased(name: ast.alias) -> str:
    return f"{name.name} as {name.asname}" if name.asname else name.name


def _bound(source: Source) -> set[str]:
    """Return the names that the module itself binds."""
    found = set(source.imported)
    for node in _of_the_module(source.tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {one.asname or one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _of_the_module(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in a module and in no function or class of it, ``try`` and ``if`` too."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            yield from _of_the_module(child)
