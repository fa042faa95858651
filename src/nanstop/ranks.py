"""Which of the processes that train together this is, as launchers say it in the environment."""

from __future__ import annotations

import os

PATIENCE_VARIABLE = "NANSTOP_RANKS_SECONDS"
"""How long one rank waits for another in a failing step, in seconds."""
PATIENCE = 300.0


def rank() -> int:
    """Return the global rank that torchrun, accelerate and others set; 0 where none is set, or none
    that is a number.

    Lightning's launcher says which process of a node this is, and which node, in its place: what
    is made of both belongs to this process alone, and is its rank on the first node.
    """
    if os.environ.get("LOCAL_RANK") and not os.environ.get("RANK"):
        return _whole("NODE_RANK") * num_launched() + _whole("LOCAL_RANK")
    return _whole("RANK")


def is_first() -> bool:
    """Return whether this process speaks for all that train together."""
    return rank() == 0


def num_launched() -> int:
    """Return how many processes a launcher has started to train together, 1 where none says so."""
    return _whole("WORLD_SIZE") or 1


def patience_seconds() -> float:
    """Return how long one rank waits for another, ``PATIENCE`` where none or no number is set."""
    return float(_whole(PATIENCE_VARIABLE) or PATIENCE)


def _whole(name: str) -> int:
    text = os.environ.get(name, "").strip()
    return int(text) if text.isdecimal() else 0
