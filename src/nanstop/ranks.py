"""Which of the processes that train together this is, as launchers say it in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping


def rank(environment: Mapping[str, str] | None = None) -> int:
    """Return the global rank that torchrun, accelerate and others set;
    0 where none is set, or none that is a number.
    """
    given = os.environ if environment is None else environment
    text = given.get("RANK", "").strip()
    return int(text) if text.isdecimal() else 0


def is_first(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether this process speaks for all that train together."""
    return rank(environment) == 0
