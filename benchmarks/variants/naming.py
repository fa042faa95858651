"""Other names: variables, functions and classes, attributes of modules, entries of batches."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping

from variants.loops import batch_of
from variants.script import Rewrite, Script, called, expression, statements

_FIELD = "field_"
_KEPT = {"self", "cls", "_", *dir(builtins)}
_NAMES = """
    attention_mask betas bias chosen completion content decoder_input_ids eps input_ids label labels
    logits loss lr messages params pixel_values position_ids prompt rejected role text
    token_type_ids weight
"""
_MODELS = frozenset(_NAMES.split())
"""Entries that the models, trainers and optimizers of libraries look for by name."""


class _Renamed(ast.NodeTransformer):
    """Renames variables; ``called``: the script's functions, whose options are renamed, too."""

    def __init__(self, names: Mapping[str, str], functions: set[str]) -> None:
        self.names, self.functions = names, functions

    def visit_Name(self, node: ast.Name) -> ast.Name:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.arg = self.names.get(node.arg, node.arg)
        self.generic_visit(node)
        return node

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.ExceptHandler:
        node.name = self.names.get(node.name, node.name) if node.name else None
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Name) and node.func.id in self.functions:
            for one in node.keywords:
                one.arg = self.names.get(one.arg, one.arg) if one.arg else None
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = self.names.get(node.name, node.name)
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        methods = {one: one.name for one in node.body if isinstance(one, ast.FunctionDef)}
        node.name = self.names.get(node.name, node.name)
        self.generic_visit(node)
        for one, name in methods.items():  # found through an object, not by a name in scope
            one.name = name
        return node


def _imported(tree: ast.Module) -> set[str]:
    return {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


def _own_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of the script itself: no methods, nothing that a library calls."""
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def _parameters(function: ast.FunctionDef) -> set[str]:
    given = function.args
    return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def variables(script: Script) -> ast.Module | None:
    """Give every variable, and every parameter of the script's own functions, a bare number."""
    tree = script.tree()
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    own = [one for one in _own_functions(tree) if not one.decorator_list]
    shared = {name for one in functions if one not in own for name in _parameters(one)}
    stored = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    fields = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for one in node.body
        for target in ast.walk(one)
        if isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name)
    }
    defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    scoped = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Global | ast.Nonlocal)
        for name in node.names
    }
    names = stored.union(*map(_parameters, own))
    names -= shared | fields | defined | scoped | _imported(tree) | _KEPT
    if not names:
        return None
    table = {name: f"v{number}" for number, name in enumerate(sorted(names))}
    return _Renamed(table, {one.name for one in own}).visit(tree)


def definitions(script: Script) -> ast.Module | None:
    """Give every function and class of the script another name."""
    tree = script.tree()
    methods = {
        id(one) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for one in node.body
    }
    names = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and id(node) not in methods
    }
    table = {name: f"Part{number}" for number, name in enumerate(sorted(names))}
    return _Renamed(table, set()).visit(tree) if table else None


def attributes(script: Script) -> ast.Module | None:
    """Give what the script's own modules keep under ``self`` another name."""
    tree = script.tree()
    reads = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {one.attr for one in reads if ast.unparse(one.value) == "self"}
    stored = {one.attr for one in reads if isinstance(one.ctx, ast.Store)}
    foreign = {one.attr for one in reads if ast.unparse(one.value) != "self"}
    text = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    table = {
        name: f"a{number}" for number, name in enumerate(sorted((own & stored) - foreign - text))
    }
    for one in reads:
        one.attr = table.get(one.attr, one.attr)
    if not table:
        return None
    tree.renamed = {new: old for old, new in table.items()}  # type: ignore[attr-defined]
    return tree


def entries(script: Script) -> ast.Module | None:
    """Give the entries of batches that only the script reads another name."""
    tree = script.tree()
    made, read = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            made |= {_text(key) for key in node.keys if key is not None}
        elif isinstance(node, ast.Subscript):
            (read if isinstance(node.ctx, ast.Load) else made).add(_text(node.slice))
        elif called(node).endswith((".pop", ".get")):
            read |= {_text(one) for one in node.args[:1]}  # type: ignore[attr-defined]
    keys = {key for key in made & read if key.isidentifier()} - _MODELS
    if not keys:
        return None
    table = {key: f"entry_{number}" for number, key in enumerate(sorted(keys))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = table.get(node.value, node.value)
    return tree


def entries_of_models(script: Script) -> ast.Module | None:
    """Give every entry of a loop's batches another name, and the model those that it knows."""
    tree = script.tree()
    changed = False
    for loop in (node for node in ast.walk(tree) if isinstance(node, ast.For)):
        name = batch_of(loop)
        if not name:
            continue
        for node in ast.walk(loop):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == name:
                keys = [node.slice]
            elif called(node) in (f"{name}.pop", f"{name}.get"):
                keys = node.args[:1]  # type: ignore[attr-defined]
            else:
                keys = []
                _known_again(node, name)
            for key in keys:
                if _text(key):
                    key.value = _FIELD + key.value  # type: ignore[attr-defined]
        text = f"NAME = {{{_FIELD!r} + key_: held_ for key_, held_ in NAME.items()}}"
        loop.body[:0] = statements(text, loop, NAME=ast.Name(name, ast.Load()))
        changed = True
    return tree if changed else None


def _known_again(node: ast.AST, name: str) -> None:
    """Take the new names off again where a batch is passed on with ``**``."""
    text = f"{{key_.removeprefix({_FIELD!r}): held_ for key_, held_ in BATCH.items()}}"
    for one in node.keywords if isinstance(node, ast.Call) else ():
        if one.arg is None and ast.unparse(one.value) == name:
            one.value = expression(text, node, BATCH=one.value)


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


REWRITES = (
    Rewrite("variables-renamed", variables),
    Rewrite("definitions-renamed", definitions),
    Rewrite("attributes-renamed", attributes),
    Rewrite("entries-renamed", entries),
    Rewrite("entries-of-models-renamed", entries_of_models),
)
