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


def num_launched(environment: Mapping[str, str] | None = None) -> int:
    """Return how many processes a launcher has started to train together, 1 where none says so."""
    given = os.environ if environment is None else environment
    text = given.get("WORLD_SIZE", "").strip()
    return int(text) if text.isdecimal() and int(text) else 1


PATIENCE_VARIABLE = "NANSTOP_RANKS_SECONDS"
"""How long one rank waits for another in a failing step, in seconds."""
PATIENCE = 300.0


def patience_seconds(environment: Mapping[str, str] | None = None) -> float:
    """Return how long one rank waits for another, ``PATIENCE`` where none or no number is set."""
    given = os.environ if environment is None else environment
    text = given.get(PATIENCE_VARIABLE, "").strip()
    return float(text) if text.isdecimal() and int(text) else PATIENCE
