"""Whether code of a script may be called once more without the script noticing."""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import math
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_DEEPEST = 4
PURE = frozenset(
    getattr(builtins, name)
    for name in (
        *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance"),
        *("len", "list", "max", "min", "pow", "range", "reversed", "round", "slice", "sorted"),
        *("sum", "super", "tuple", "zip", "ValueError", "TypeError", "RuntimeError"),
    )
)
LEAVES = frozenset(
    {
        *("append", "extend", "insert", "pop", "remove", "clear", "update", "setdefault", "add"),
        *("write", "save", "put", "send", "distributed", "register_hook"),
    }
)
"""What is asked of an object so that something is left behind; so is what ends in _."""
_STORES = frozenset(
    f"{kind}_{place}"
    for kind in ("STORE", "DELETE")
    for place in ("GLOBAL", "NAME", "SUBSCR", "SLICE")
) | {"IMPORT_NAME"}


_FILLS = frozenset({"STORE_SUBSCR", "STORE_SLICE"})
_FRESH = frozenset(
    {
        *("zeros", "ones", "empty", "full", "arange", "rand", "randn", "tensor", "clone"),
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full"),
        *("softmax", "log_softmax", "exp", "log", "sqrt", "sigmoid", "tanh"),
        *("normal", "standard_normal", "uniform", "integers"),
    }
)
"""What gives new memory each time, by names of torch's and of NumPy's generators."""


def leaves_nothing(function: Any, *packages: str) -> bool:
    """Return whether a function is seen to use arithmetic and these packages alone, and to store
    into nothing but its own variables and the attributes of its first argument.

    Read from its code: False wherever that does not tell, and where it writes in place into
    anything but what it has made itself.
    """
    return _is_pure(function, packages, _DEEPEST)


def _is_pure(function: Any, packages: tuple[str, ...], depth: int) -> bool:
    if not isinstance(function, FunctionType) or not depth:
        return False
    first = next(iter(function.__code__.co_varnames[: function.__code__.co_argcount]), "")
    codes = list(_codes(function.__code__))
    free = set(function.__code__.co_freevars)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        known = {name: cell.cell_contents for name, cell in cells}
    except ValueError:  # not filled yet
        return False
    filled = _lines_that_fill(function.__code__)
    for code in codes:
        before = ""
        lines = _line_starts(code) if filled and code is function.__code__ else {}
        line = 0
        for step in dis.get_instructions(code):
            line = lines.get(step.offset, line)
            is_filled = line in filled and (step.opname in _FILLS or _is_assigned(step))
            if _stores(step, before, first, free) and not is_filled:
                return False
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                used = function.__globals__.get(step.argval, getattr(builtins, step.argval, None))
                if not _is_harmless(used, packages, depth):
                    return False
            is_read = step.opname.startswith("LOAD_FAST")
            read = step.argval if is_read else ""
            before = str(read[-1] if isinstance(read, tuple) else read)
    return all(_is_harmless(value, packages, depth) for value in known.values())


def _stores(step: dis.Instruction, before: str, first: str, free: set[str]) -> bool:
    """Return whether an instruction may change what is not the function's own. ``before``: the
    variable that was read right before it.
    """
    name = str(step.argval)
    if step.opname in _STORES or step.opname.startswith("INPLACE_"):
        return True
    if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
        return not first or before != first
    if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        is_in_place = name.endswith("_") and not name.startswith("_") and name != "requires_grad_"
        return is_in_place or name in LEAVES
    return _is_assigned(step) or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and name in free)


def _is_assigned(step: dis.Instruction) -> bool:
    """Return whether an instruction is of ``+=`` or the like."""
    is_named = step.opname == "BINARY_OP" and step.argrepr.endswith("=")
    return is_named or step.opname.startswith("INPLACE_")


def _line_starts(code: CodeType) -> dict[int, int]:
    return {start: line for start, _, line in code.co_lines() if line is not None}


def _lines_that_fill(code: CodeType) -> set[int]:
    """Return the lines on which a function writes in place, with ``=`` or ``+=``, into nothing but
    memory that it has made itself.
    """
    node = _definition(code)
    if node is None:
        return set()
    own = _made_in(node)
    good: set[int] = set()
    bad: set[int] = set()
    for one in ast.walk(node):
        if isinstance(one, ast.Assign):
            written = [t for target in one.targets for t in ast.walk(target) if _is_written(t)]
        elif isinstance(one, ast.AugAssign):
            written = [one.target]
        else:
            continue
        lines = range(one.lineno, (one.end_lineno or one.lineno) + 1)
        (good if all(_root(t) in own for t in written) else bad).update(lines if written else ())
    return good - bad


def _definition(code: CodeType) -> ast.FunctionDef | None:
    """Return the source of a function without functions inside, None where that is not known."""
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            inner = [one for one in ast.walk(node) if isinstance(one, _SCOPES) and one is not node]
            if first == code.co_firstlineno and not inner:
                return node
    return None


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def _made_in(function: ast.FunctionDef) -> set[str]:
    """Return the variables of a function that hold numbers, or memory that it has made itself,
    whenever they hold anything.
    """
    made: dict[str, bool] = {}
    plain: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.AugAssign):
            plain.add(id(node.target))
        for name, given in _given(node):
            plain.add(id(name))
            made[name.id] = made.get(name.id, True) and _is_fresh(given)
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            made[node.id] = made.get(node.id, False) and id(node) in plain  # else by a loop, a with
        elif isinstance(node, ast.arg):
            made[node.arg] = False
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            made.update(dict.fromkeys(node.names, False))
    return {name for name, is_own in made.items() if is_own}


def _given(node: ast.AST) -> Iterator[tuple[ast.Name, ast.expr]]:
    """Yield the variables that an assignment gives one value each."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return
    target, value = node.targets[0], node.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = [*zip(target.elts, value.elts, strict=False)]
    yield from ((one, given) for one, given in pairs if isinstance(one, ast.Name))


def _is_fresh(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, (int, float))
    if isinstance(value, ast.UnaryOp):
        return isinstance(value.op, ast.USub)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in _FRESH and not any(one.arg == "out" for one in value.keywords)
    return isinstance(value, ast.BinOp)


def _is_written(node: ast.AST) -> bool:
    return isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, ast.Store)


def _root(node: ast.AST) -> str:
    """Return the variable that a subscript is of, "" where it is of something else."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _codes(one)


def _is_harmless(value: Any, packages: tuple[str, ...], depth: int) -> bool:
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return True
    if isinstance(value, tuple):
        return all(_is_harmless(one, packages, depth) for one in value)
    if isinstance(value, ModuleType):
        return value is math or value.__name__.partition(".")[0] in packages
    try:
        if value in PURE:
            return True
    except TypeError:  # not hashable
        return False
    home = str(getattr(value, "__module__", None) or type(value).__module__)
    if home.partition(".")[0] in packages:
        return True
    return _is_pure(value, packages, depth - 1)
