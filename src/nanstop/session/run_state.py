"""What a failure finds when it comes: the run that it comes to, to be read and not acted upon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from nanstop.decide.policy import Policy
from nanstop.records import Atom, BatchRows, RunFacts
from nanstop.replay.step import Batch, ModelView
from nanstop.session.history import History
from nanstop.session.telling.live import Live


class RunState(Protocol):
    """A watched run as it stands. ``in_force``: remedies that were adopted for the rest of it.
    ``metrics``: numbers of nanstop's own.
    """

    @property
    def policy(self) -> Policy: ...
    @property
    def view(self) -> ModelView: ...
    @property
    def facts(self) -> RunFacts: ...
    @property
    def series(self) -> History: ...
    @property
    def metrics(self) -> History: ...
    @property
    def live(self) -> Live: ...
    @property
    def rows_of(self) -> Callable[[Batch], BatchRows | None]: ...
    @property
    def decode(self) -> Callable[[Sequence[int]], str]: ...
    @property
    def in_force(self) -> tuple[Atom, ...]: ...
