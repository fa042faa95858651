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


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Return ``cls`` as a frozen dataclass with slots and keywords only.

    Its JSON has non-finite floats as strings, and reading refuses a key that it does not know.
    """
    made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
    config = {"ser_json_inf_nan": "strings", "extra": "forbid"}
    made.__pydantic_config__ = config  # pyright: ignore[reportAttributeAccessIssue]
    return made
