"""The lines of a script that hooks on the gradients of parameters come from."""

from __future__ import annotations

from functools import partial
from inspect import unwrap
from types import CodeType
from typing import Any
from weakref import ref

from nanstop.own_code import is_library
from nanstop.records import SourceLine
from nanstop.tracing.places import source_line, user_line
from nanstop.tracing.source.bindings import writing_lines

_FEW = 2
"""Lines of a hook that may be the one which changes what it is given."""
MOST_HOOKS = 4096
"""Registrations whose lines are kept."""

_registered: dict[int, tuple[CodeType, int]] = {}
_handles: dict[int, ref[Any]] = {}


def registering(original: Any, tensor: Any, hook: Any) -> Any:
    """Register a hook by ``original`` and note the line that asked for it, where the tensor is a
    parameter's; return the handle.
    """
    handle = original(tensor, hook)
    if tensor.is_leaf and len(_registered) < MOST_HOOKS:
        line = user_line()
        if line is not None:
            _registered[handle.id], _handles[handle.id] = line, ref(handle)
    return handle


def stays(key: int) -> bool:
    """Return whether the hook under ``key`` is there for good: nobody holds the handle that would
    remove it.
    """
    handle = _handles.get(key)
    return handle is not None and handle() is None


def hook_lines(hook: Any, key: int) -> tuple[SourceLine, ...]:
    """Return the line that registered a hook under ``key``, and those of a script's own hook which
    do its work, where they are few, else where it begins; as far as they are known.
    """
    code = _code(hook)
    own = map(source_line, _work(code)) if code is not None else ()
    asked = source_line(_registered.get(key))
    return tuple(dict.fromkeys(line for line in (asked, *own) if line is not None))


def _code(hook: Any) -> CodeType | None:
    while isinstance(hook, partial):
        hook = hook.func
    hook = unwrap(hook)
    hook = getattr(hook, "__func__", hook)
    found = getattr(hook, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    is_shown = found is not None and not is_library(found.co_filename)
    return found if is_shown else None


def _work(code: CodeType) -> list[tuple[CodeType, int]]:
    inside = {line for _, _, line in code.co_lines() if line} - {code.co_firstlineno}
    written = tuple(inside) if len(inside) == 1 else writing_lines(code)
    found = written if 0 < len(written) <= _FEW else (code.co_firstlineno,)
    return [(code, line) for line in found]
