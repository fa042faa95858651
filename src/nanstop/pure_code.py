"""Whether code of a script may be called once more without the script noticing."""

from __future__ import annotations

import builtins
import dis
import math
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

_DEEPEST = 4
_PURE = frozenset(
    getattr(builtins, name)
    for name in (
        *("abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance"),
        *("len", "list", "max", "min", "pow", "range", "reversed", "round", "slice", "sorted"),
        *("sum", "super", "tuple", "zip", "ValueError", "TypeError", "RuntimeError"),
    )
)
_LEAVES = frozenset(
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


def leaves_nothing(function: Any, *packages: str) -> bool:
    """Return whether a function is seen to use arithmetic and these packages alone, and to store
    into nothing but its own variables and the attributes of its first argument.

    Read from its code: False wherever that does not tell, and where it writes into anything in
    place.
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
    for code in codes:
        before = ""
        for step in dis.get_instructions(code):
            if _stores(step, before, first, free):
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
        return is_in_place or name in _LEAVES
    is_assigned = step.opname == "BINARY_OP" and step.argrepr.endswith("=")
    return is_assigned or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and name in free)


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
        if value in _PURE:
            return True
    except TypeError:  # not hashable
        return False
    home = str(getattr(value, "__module__", None) or type(value).__module__)
    if home.partition(".")[0] in packages:
        return True
    return _is_pure(value, packages, depth - 1)
