"""The one table of what ``autowatch`` has replaced in torch and transformers, and the way back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from types import ClassMethodDescriptorType
from typing import Any
from weakref import WeakSet

from nanstop.frozen import frozen
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


class Table:
    """Attributes of classes and modules that were replaced, and hooks that were registered.

    A script may wrap a replacement in one of its own, or keep it and put it back: what it has put
    there stays, and a replacement that was taken back does what the original does.
    """

    def __init__(self) -> None:
        self._replaced: dict[tuple[int, str], _Replaced] = {}
        self._taken_back: WeakSet[Callable[..., Any]] = WeakSet()
        self._owners: dict[tuple[int, str], Any] = {}
        self._hooks: list[Any] = []

    def replace(
        self, owner: Any, name: str, stand_in: Callable[..., Any], *, also: tuple[Any, ...] = ()
    ) -> None:
        """Have ``stand_in(original, *args)`` called for ``owner.name(*args)``.

        Once for each attribute.

        Of a class method, both get the class as their first argument. What ``stand_in`` has a
        place for it gets by its place, as a script may give it by the original's name.
        ``also``: further owners of the same function, which get the same replacement.
        """
        if (id(owner), name) in self._replaced:
            return
        own = name in vars(owner)
        original = vars(owner)[name] if own else _inherited(owner, name)

        of_class = isinstance(original, (classmethod, ClassMethodDescriptorType))
        called = _taking_the_class(original) if of_class else original
        num_places = sum(one.default is one.empty for one in _places(stand_in)) - 1
        is_taken_back = False

        @functools.wraps(getattr(original, "__func__", original))
        def replacement(*args: Any, **kwargs: Any) -> Any:
            if is_taken_back:
                return called(*args, **kwargs)
            if kwargs and len(args) < num_places:
                args, kwargs = _by_place(original, num_places, args, kwargs)
            return stand_in(called, *args, **kwargs)

        def take_back() -> None:
            nonlocal is_taken_back
            is_taken_back = True
            self._taken_back.add(replacement)

        placed = classmethod(replacement) if of_class else replacement
        for each in (owner, *also):
            self._owners[id(each), name] = each
            self._replaced[id(each), name] = _Replaced(
                each, original if own else None, placed, stand_in, take_back
            )
            setattr(each, name, placed)

    def stand_in(self, owner: Any, name: str) -> Callable[..., Any] | None:
        """Return what stands in for an attribute now, None where nothing does."""
        replaced = self._replaced.get((id(owner), name))
        return replaced and replaced.stand_in

    def restore(self, owner: Any, name: str) -> None:
        """Put one attribute back, unless the script has put something else there."""
        replaced = self._replaced.pop((id(owner), name))
        replaced.take_back()
        if vars(owner).get(name) is not replaced.placed:
            return
        if replaced.original is not None:
            setattr(owner, name, replaced.original)
        else:
            delattr(owner, name)

    def hook(self, handle: Any) -> None:
        """Keep the handle of a hook that ``undo`` has to remove."""
        self._hooks.append(handle)

    def undo(self) -> None:
        """Put everything back; a second call finds nothing to do."""
        for replaced in reversed(tuple(self._replaced.values())):
            for key in [k for k in self._replaced if k[0] == id(replaced.owner)]:
                self.restore(replaced.owner, key[1])
        for (_, name), owner in self._owners.items():
            while (put_back := vars(owner).get(name)) in self._taken_back:
                setattr(owner, name, put_back.__wrapped__)
        self._owners.clear()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()


@frozen
class _Replaced:
    """``original``: None of an attribute that was inherited. ``placed``: what was put there;
    ``take_back`` has it do what the original does from then on.
    """

    owner: Any
    original: Any
    placed: Any
    stand_in: Callable[..., Any]
    take_back: Callable[[], None]


def _by_place(
    original: Callable[..., Any], num_places: int, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments, those of the first places that were given by the original's names moved to
    their places.
    """
    others = dict(named)
    for place in _places(original)[len(args) : num_places]:
        if place.name not in others:
            break
        args = (*args, others.pop(place.name))
    return args, others


def _places(function: Callable[..., Any]) -> list[Parameter]:
    """Return what a function can be given by place, nothing of one without a signature."""
    try:
        parameters = signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return [one for one in parameters if one.kind in kinds]


def _taking_the_class(method: Any) -> Callable[..., Any]:
    """Return a function that calls a method of a class, one written in C too, for the class that
    is its first argument.
    """

    def called(kind: type, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, kind)(*args, **kwargs)

    return called


def _inherited(owner: type, name: str) -> Callable[..., Any]:
    """Return a function that calls what the class inherits, looked up at the call.

    It may be replaced as well.
    """

    def inherited(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, instance), name)(*args, **kwargs)

    return inherited
