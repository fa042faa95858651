"""Callbacks of transformers and TRL.

The classes that others build on, which of them only report, and what is added to the reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import integrations
from transformers.trainer_callback import (
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

from nanstop.hosts.patching import Patches
from nanstop.own_code import is_class_of

__all__ = ["Trackers", "TrainerCallback", "is_reporting", "is_tracker", "is_users"]

_SHOWN_ELSEWHERE = ("NotebookProgressCallback", "RichProgressCallback")
"""Progress by means that need a notebook or `rich`: importing their modules would need them,
too.
"""


def is_reporting(callback: Any) -> bool:
    """Return whether a callback does nothing but show what a run logs, or send it to a service."""
    kind = type(callback)
    return (
        isinstance(callback, (PrinterCallback, ProgressCallback))
        or (kind.__name__ in _SHOWN_ELSEWHERE and is_class_of(kind, "transformers", "trl"))
        or is_tracker(callback)
    )


def is_tracker(callback: Any) -> bool:
    """Return whether a callback sends what a run logs to a service, or into its files."""
    return is_class_of(type(callback), integrations.__name__)


class Trackers:
    """Adds ``numbers`` to the training logs that a trainer's trackers are given, and to nothing
    else: the trainer's own logs, its table and its console stay as they are.
    """

    def __init__(self, numbers: Callable[[], Mapping[str, float]]) -> None:
        self._numbers = numbers
        self._patches = Patches()

    def begin(self, trainer: Any) -> None:
        """Have the trackers of a training get the numbers with each log, and no more those of an
        earlier training.
        """
        self.end()
        for callback in trainer.callback_handler.callbacks:
            if is_tracker(callback):
                sent = partial(self._sent, callback.on_log)
                self._patches.set(callback, "on_log", sent)

    def end(self) -> None:
        """Leave every tracker as it was."""
        self._patches.undo()

    def _sent(
        self, on_log: Callable[..., Any], args: Any, state: Any, control: Any, **about: Any
    ) -> Any:
        logs = about.get("logs")
        if logs and "loss" in logs:
            about["logs"] = {**logs, **self._numbers()}
        return on_log(args, state, control, **about)


def is_users(callback: Any) -> bool:
    """Return whether a callback may change a training: the user's own, or early stopping."""
    library = is_class_of(type(callback), "transformers", "trl", "nanstop")
    return isinstance(callback, EarlyStoppingCallback) or not library
