"""The lines of a script that hooks on the gradients of parameters come from."""

from __future__ import annotations

from functools import partial
from inspect import unwrap
from types import CodeType
from typing import Any

from nanstop.own_code import is_library
from nanstop.records import SourceLine
from nanstop.tracing.places import source_line, user_line

MOST_HOOKS = 4096
"""Registrations whose lines are kept."""

_registered: dict[int, tuple[CodeType, int]] = {}


def registering(original: Any, tensor: Any, hook: Any) -> Any:
    """Register a hook by ``original`` and note the line that asked for it, where the tensor is a
    parameter's; return the handle.
    """
    handle = original(tensor, hook)
    if tensor.is_leaf and len(_registered) < MOST_HOOKS:
        line = user_line()
        if line is not None:
            _registered[handle.id] = line
    return handle


def hook_lines(hook: Any, key: int) -> tuple[SourceLine, ...]:
    """Return the line that registered a hook under ``key``, and that of a script's own hook which
    does its work, where it has one such, else where it begins; as far as they are known.
    """
    code = _code(hook)
    own = source_line(_work(code)) if code is not None else None
    asked = source_line(_registered.get(key))
    return tuple(dict.fromkeys(line for line in (asked, own) if line is not None))


def _code(hook: Any) -> CodeType | None:
    while isinstance(hook, partial):
        hook = hook.func
    hook = unwrap(hook)
    hook = getattr(hook, "__func__", hook)
    found = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    is_shown = found is not None and not is_library(found.co_filename)
    return found if is_shown else None


def _work(code: CodeType) -> tuple[CodeType, int]:
    inside = {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
    return code, inside.pop() if len(inside) == 1 else code.co_firstlineno
