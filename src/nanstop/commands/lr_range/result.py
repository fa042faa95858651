"""What a sweep in a script's process has measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from nanstop.records.vocabulary import CONFIG


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """``losses``: that of each optimizer step, before its update, the one after the last rate included.

    ``problem``: why this training cannot be swept. ``ended``: the exception that it ended by too soon. Both may be empty.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG

    losses: tuple[float, ...] = ()
    problem: str = ""
    ended: str = ""
