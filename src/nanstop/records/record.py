"""What every record is: a frozen dataclass that pydantic reads and writes as one."""

from __future__ import annotations

from typing import TypeVar

from nanstop.frozen import dataclass_transform, frozen

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[T]) -> type[T]:
    """Return ``cls`` as a frozen dataclass with slots and keywords only.

    Its JSON has non-finite floats as strings, and reading refuses a key that it does not know.
    """
    made = frozen(kw_only=True)(cls)
    config = {"ser_json_inf_nan": "strings", "extra": "forbid"}
    made.__pydantic_config__ = config  # pyright: ignore[reportAttributeAccessIssue]
    return made
