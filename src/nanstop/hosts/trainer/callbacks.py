"""Callbacks of transformers and TRL.

The classes that others build on, which of them only report, and what is added to the reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from nanstop.hosts.trackers import (
    Send,
    to_mlflow,
    to_tensorboard,
    to_trackio,
    to_wandb,
)
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
        self._trainer: Any = None
        self._patches = Patches()

    def begin(self, trainer: Any) -> None:
        """Have the trackers of a training get the numbers with each log, and no more those of an
        earlier training.
        """
        self.end()
        self._trainer = trainer
        for callback in self._trackers():
            sent = partial(self._sent, callback.on_log)
            self._patches.set(callback, "on_log", sent)

    def end(self) -> None:
        """Leave every tracker as it was."""
        self._patches.undo()

    def sends(self) -> Iterator[tuple[str, Send]]:
        """Yield what gives an incident to each tracker that has a run now, with its name."""
        if not self._trainer.is_world_process_zero():
            return
        for callback in self._trackers():
            for kind, sending in _SENDS.items():
                if isinstance(callback, getattr(integrations, kind, ())):
                    send = sending(callback)
                    if send is not None:
                        yield kind, send

    def _trackers(self) -> Iterator[Any]:
        return filter(is_tracker, self._trainer.callback_handler.callbacks)

    def _sent(
        self, on_log: Callable[..., Any], args: Any, state: Any, control: Any, **about: Any
    ) -> Any:
        logs = about.get("logs")
        if logs and "loss" in logs:
            about["logs"] = {**logs, **self._numbers()}
        return on_log(args, state, control, **about)


def _of_mlflow(callback: Any) -> Send | None:
    run = callback._ml_flow.active_run()
    return to_mlflow(callback._ml_flow.MlflowClient(), run.info.run_id) if run else None


_SENDS: Mapping[str, Callable[[Any], Send | None]] = {
    "WandbCallback": lambda one: to_wandb(one._wandb.run) if one._wandb.run else None,
    "TensorBoardCallback": lambda one: to_tensorboard(one.tb_writer) if one.tb_writer else None,
    "MLflowCallback": _of_mlflow,
    "TrackioCallback": lambda one: to_trackio(one._trackio),
}
"""How each of transformers' own integrations is given an incident, None while it has no run."""


def is_users(callback: Any) -> bool:
    """Return whether a callback may change a training: the user's own, or early stopping."""
    library = is_class_of(type(callback), "transformers", "trl", "nanstop")
    return isinstance(callback, EarlyStoppingCallback) or not library
