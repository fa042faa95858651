"""Nested arguments of a call: what they hold of a kind, what that is called, and what else it may
be replaced by. Containers are tuples, lists and dicts; any other is a value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")

_MOST_OBJECTS = 64
"""Objects that are looked into: one may lead to a whole data set."""
_HOLD_OTHERS = (nn.Module, type, FunctionType, MethodType, ModuleType)


def leaves(*nested: Any, kind: type[T] | tuple[type[T], ...]) -> Iterator[T]:
    """Yield the values of a kind, or of some, in order."""
    for value in nested:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from leaves(*value, kind=kind)
        elif type(value) is dict:
            yield from leaves(*value.values(), kind=kind)


def mapped(nested: Any, function: Callable[[Any], Any]) -> Any:
    """Return what is nested with each value replaced by what ``function`` makes of it."""
    if type(nested) in (tuple, list):
        return type(nested)(mapped(one, function) for one in nested)
    if type(nested) is dict:
        return {key: mapped(one, function) for key, one in nested.items()}
    return function(nested)


def named_inputs(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[T]
) -> Iterator[tuple[str, T]]:
    """Yield the values of a kind among a model's inputs, with what its forward calls them; those of
    a dict by their keys, those of a list with their place in it, and what these hold behind a dot.
    """
    entries = zip(_parameter_names(function, len(args)), args, strict=True)
    for name, value in (*entries, *kwargs.items()):
        if type(value) is dict:
            yield from ((str(k), v) for k, v in value.items() if isinstance(v, kind))
        else:
            yield from _named(name, value, kind)


def _named(name: str, value: Any, kind: type[T]) -> Iterator[tuple[str, T]]:
    if isinstance(value, kind):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for place, one in enumerate(value):
            yield from _named(f"{name}.{place}", one, kind)
    elif type(value) is dict:
        for key, one in value.items():
            yield from _named(f"{name}.{key}", one, kind)


def named_in_objects(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: type[T]
) -> Iterator[tuple[str, T]]:
    """Yield the values of a kind that objects of other classes hold among a model's inputs (a batch
    of graphs), with what the script would write for them: attributes of their own are left out.
    """
    entries = zip(_parameter_names(function, len(args)), args, strict=True)
    for name, value in (*entries, *kwargs.items()):
        if not isinstance(value, (kind, tuple, list, dict)):
            yield from held_by(name, value, kind)


def held_by(name: str, value: Any, kind: type[T]) -> Iterator[tuple[str, T]]:
    """Yield the values of a kind that an object holds, see ``named_in_objects``."""
    for own, one in _reached(name, value, kind):
        if isinstance(one, kind):
            yield own, one


def tables_in(value: Any, but: type[Any]) -> Iterator[dict[Any, Any]]:
    """Yield the tables of an object, and of the objects in these, see ``named_in_objects``: dicts,
    and the attributes of any other. ``but``: a kind that is not looked into.
    """
    objects = (one for _, one in _reached("", value, but) if not isinstance(one, but))
    return filter(None, map(_table_of, objects))


def _reached(name: str, value: Any, kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield with their names an object, those that it leads to, and the values of a kind that these
    hold, which are not looked into.
    """
    pending, seen = [(name, value)], set[int]()
    while pending and len(seen) < _MOST_OBJECTS:
        name, value = pending.pop()
        if isinstance(value, kind):
            yield name, value
            continue
        if id(value) in seen or isinstance(value, _HOLD_OTHERS):
            continue
        seen.add(id(value))
        yield name, value
        for key, one in reversed(_table_of(value).items()):
            is_own = not isinstance(key, str) or key.startswith("_")
            pending.append((name if is_own else f"{name}.{key}", one))


def _table_of(value: Any) -> dict[Any, Any]:
    held = value if type(value) is dict else getattr(value, "__dict__", None)
    return held if type(held) is dict else {}


def _parameter_names(function: Any, count: int) -> list[str]:
    """Return what a model's forward calls its first positional arguments.

    ``arg0``, ``arg1``, ... where it does not say.
    """
    numbered = [f"arg{place}" for place in range(count)]
    forward = getattr(function, "forward", None)
    if not inspect.ismethod(forward):
        return numbered
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in kinds][:count]
    return [*names, *numbered[len(names) :]]
