"""Frozen dataclasses whose import is cheap: what is written for a class is written when the first
of it is made.

``dataclasses`` writes and compiles an ``__init__``, a ``__setattr__`` and more for each class as it
is imported. A healthy run imports hundreds of classes and makes instances of a few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Any:
        """Return a decorator as it is: only type checkers ask, and Python 3.10 has none."""
        return lambda decorator: decorator


T = TypeVar("T")


def _values(one: Any) -> tuple[Any, ...]:
    return tuple(getattr(one, name) for name in one.__dataclass_fields__)


def _equal(one: Any, other: object) -> bool:
    return _values(one) == _values(other) if type(one) is type(other) else NotImplemented


def _hash(one: Any) -> int:
    return hash(_values(one))


def _shown(one: Any) -> str:
    named = zip(one.__dataclass_fields__, _values(one), strict=True)
    return f"{type(one).__qualname__}({', '.join(f'{name}={value!r}' for name, value in named)})"


def _refuse_to_set(one: Any, name: str, _value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r} of {type(one).__qualname__}")


def _refuse_to_delete(one: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r} of {type(one).__qualname__}")


def _restored(one: Any, state: tuple[Any, ...]) -> None:
    for name, value in zip(one.__dataclass_fields__, state, strict=True):
        object.__setattr__(one, name, value)


def _first_made(one: Any, *args: Any, **named: Any) -> None:
    """Stand in for ``__init__`` until it is called: write it, put it in place, and call it."""
    cls = type(one)
    own = ("__post_init__", "__doc__")
    after = {name: value for name, value in vars(cls).items() if name in own}
    same = [(each.name, each.type, _same(each)) for each in fields(cls)]
    same_class = make_dataclass(
        cls.__name__, same, namespace=after, frozen=True, eq=False, repr=False
    )
    made = vars(same_class)["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    cls.__init__ = made
    made(one, *args, **named)


def _same(each: Any) -> Any:
    """Return a field like this one, for another class."""
    return field(
        default=each.default,
        default_factory=each.default_factory,
        init=each.init,
        kw_only=each.kw_only,
    )


_METHODS: dict[str, Callable[..., Any]] = {
    "__init__": _first_made,
    "__eq__": _equal,
    "__hash__": _hash,
    "__repr__": _shown,
    "__setattr__": _refuse_to_set,
    "__delattr__": _refuse_to_delete,
    "__getstate__": _values,
    "__setstate__": _restored,
}


@overload
def frozen(cls: type[T], /) -> type[T]: ...
@overload
def frozen(*, kw_only: bool) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True)
def frozen(cls: type[T] | None = None, /, *, kw_only: bool = False) -> Any:
    """Return ``cls`` as a frozen dataclass with slots; without a class, what makes one of it.

    It compares, hashes, shows and pickles by its fields, and its own methods stay.
    """
    if cls is None:
        return lambda given: _made(given, kw_only=kw_only)
    return _made(cls, kw_only=kw_only)


def _made(cls: type[T], *, kw_only: bool) -> type[T]:
    for name, method in _METHODS.items():
        if name not in vars(cls):
            setattr(cls, name, method)
    made = dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)
    return made(cls)
