"""A Lightning trainer's loggers while it fits: nanstop's numbers in the rows of its training logs,
and incidents.

Lightning's training is watched as a loop, which knows nothing of the trainer around it: sessions
that are opened while a trainer fits are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from nanstop.hosts.lightning.trainers import PACKAGES
from nanstop.hosts.patching import Patches
from nanstop.hosts.trackers import Incidents, Send, to_mlflow, to_tensorboard, to_wandb
from nanstop.session.telling.numbers import numbers

if TYPE_CHECKING:
    from nanstop.session.session import Session

_SENDS: Mapping[str, Any] = {
    "WandbLogger": lambda logger: to_wandb(logger.experiment),
    "TensorBoardLogger": lambda logger: to_tensorboard(logger.experiment),
    "MLFlowLogger": lambda logger: to_mlflow(logger.experiment, logger.run_id),
}


class Loggers:
    """What the loggers of one trainer are given, from the first step of a ``fit`` to its end."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sessions: list[Session] = []
        self._incidents: list[Incidents] = []
        self._patches = Patches()

    def opened(self, session: Session) -> None:
        """Have the loggers told of a session that was opened."""
        if any(known is session for known in self._sessions):
            return
        self._sessions.append(session)
        incidents = Incidents(self._sends)
        incidents.follow(session)
        self._incidents.append(incidents)
        for logger in self._trainer.loggers:
            if not self._patches.holds(logger, "log_metrics"):
                logged = partial(self._logged, logger.log_metrics)
                self._patches.set(logger, "log_metrics", logged)

    def end(self) -> None:
        """Leave every logger as it was."""
        self._patches.undo()
        for incidents in self._incidents:
            incidents.end()

    def _logged(self, log: Any, metrics: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        own: dict[str, float] = {}
        if self._trainer.training:
            for session in self._sessions:
                own |= numbers(session)
        return log({**metrics, **own}, *args, **kwargs)

    def _sends(self) -> Iterator[tuple[str, Send]]:
        for logger in self._trainer.loggers:
            for kind in type(logger).__mro__:
                if kind.__name__ in _SENDS and kind.__module__.startswith(PACKAGES):
                    yield kind.__name__, _SENDS[kind.__name__](logger)
