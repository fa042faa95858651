"""Callbacks of transformers and TRL.

The classes that others build on, and which of them only report.
"""

from __future__ import annotations

from typing import Any

from transformers import integrations
from transformers.trainer_callback import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

__all__ = ["TrainerCallback", "is_reporting", "is_users"]

_SHOWN_ELSEWHERE = ("NotebookProgressCallback", "RichProgressCallback")
"""Progress by means that need a notebook or `rich`: importing their modules would need them,
too.
"""


def is_reporting(callback: Any) -> bool:
    """Return whether a callback does nothing but show what a run logs, or send it to a service."""
    kind = type(callback)
    return (
        isinstance(callback, (PrinterCallback, ProgressCallback))
        or kind.__name__ in _SHOWN_ELSEWHERE
        or kind.__module__.startswith(integrations.__name__)
    )


def is_users(callback: Any) -> bool:
    """Return whether a callback may change a training: the user's own, or early stopping."""
    library = type(callback).__module__.startswith(("transformers.", "trl.", "nanstop."))
    return isinstance(callback, EarlyStoppingCallback) or not library
