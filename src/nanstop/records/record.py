"""What every record is: a frozen dataclass that pydantic reads and writes as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

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


_METHODS = {"__eq__": _equal, "__hash__": _hash, "__repr__": _shown}
"""Once for all records: dataclasses would write and compile its own for each of them, which is half
of the time that their import takes.
"""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Return ``cls`` as a frozen dataclass with slots and keywords only.

    Its JSON has non-finite floats as strings, and reading refuses a key that it does not know.
    """
    for name, method in _METHODS.items():
        if name not in vars(cls):
            setattr(cls, name, method)
    made = dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)(cls)
    config = {"ser_json_inf_nan": "strings", "extra": "forbid"}
    made.__pydantic_config__ = config  # pyright: ignore[reportAttributeAccessIssue]
    return made
