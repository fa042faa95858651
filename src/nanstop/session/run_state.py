"""What a failure finds when it comes: the run that it comes to, and what may be told to that run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nanstop.decide.policy import Policy
from nanstop.records import Atom, Diagnosis, Report, RunFacts
from nanstop.replay.step import ModelView
from nanstop.session.history import History
from nanstop.store.incidents import Store


class RunState(Protocol):
    """A watched run, as its failures see it."""

    policy: Policy
    store: Store
    view: ModelView
    facts: RunFacts
    series: History
    announce: Callable[[Report | Diagnosis | str], None]

    @property
    def in_force(self) -> tuple[Atom, ...]:
        """Remedies that were adopted for the rest of the run."""
        ...

    def adopt(self, atoms: tuple[Atom, ...]) -> None:
        """Put remedies in force for the rest of the run."""
        ...

    def logged(self) -> None:
        """Note that the host has logged."""
        ...

    def write_summary(self) -> None:
        """Bring ``summary.json`` up to date."""
        ...
