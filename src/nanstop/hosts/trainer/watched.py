"""What the parts of a trainer's watch use of it."""

from __future__ import annotations

from typing import Any, Protocol

from nanstop.decide.decision import Decision
from nanstop.hosts.patching import Patches
from nanstop.hosts.trainer.actions import Carrier
from nanstop.hosts.trainer.objective import Objective
from nanstop.hosts.trainer.steps.reentry import Reentry
from nanstop.hosts.trainer.view import HfView
from nanstop.records import RunFacts, StepId
from nanstop.session.watched_run import WatchedRun


class WatchedTrainer(Protocol):
    """A trainer under watch. ``session`` is None until training has begun."""

    trainer: Any
    session: WatchedRun | None
    view: HfView
    facts: RunFacts
    patches: Patches
    host: Reentry
    carrier: Carrier
    objective: Objective

    def note_hook_writes(self) -> None:
        """Learn of hooks that update weights inside a backward, once one has been seen."""
        ...

    def open(self) -> None:
        """Open the session, once a training."""
        ...

    def step_id(self, *, step: int | None = None, micro: int | None = None) -> StepId:
        """Return the id of the trainer's present step, or of the one given."""
        ...

    def stop(self, decision: Decision) -> None:
        """Have the host end training."""
        ...
