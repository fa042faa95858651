"""What a failure finds when it comes: the run that it comes to, to be read and not acted upon."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch.optim import Optimizer

from nanstop.decide.policy import Policy
from nanstop.numerics.weights import param_groups
from nanstop.records import Atom, BatchRows, Environment, Report, RunFacts, StepId
from nanstop.replay.step import Batch, ModelView, Step
from nanstop.session.history import History
from nanstop.session.telling.live import Live
from nanstop.session.watched_run import WrittenBy


class RunState(Protocol):
    """A watched run as it stands. ``in_force``: remedies that were adopted for the rest of it.
    ``metrics``: numbers of nanstop's own. ``rooms``: headroom of each module.
    """

    @property
    def policy(self) -> Policy: ...
    @property
    def view(self) -> ModelView:
        """Of what is trained."""
        ...

    def follow(self, view: ModelView) -> None:
        """Have the run be of another model from here on."""
        ...

    @property
    def facts(self) -> RunFacts: ...
    @property
    def environment(self) -> Environment: ...
    @property
    def series(self) -> History: ...
    @property
    def metrics(self) -> History: ...

    @property
    def rooms(self) -> History: ...
    @property
    def live(self) -> Live: ...
    @property
    def reports(self) -> Sequence[Report]: ...
    @property
    def present(self) -> Callable[[], StepId | None]: ...
    @property
    def rows_of(self) -> Callable[[Batch], BatchRows | None]: ...
    @property
    def decode(self) -> Callable[[Sequence[int]], str]: ...
    @property
    def written_by(self) -> WrittenBy: ...
    @property
    def in_force(self) -> tuple[Atom, ...]: ...


def present_facts(facts: RunFacts, step: Step | None, first: Optimizer | None = None) -> RunFacts:
    """Return the facts of a run as they are in a step:
    layers may have been unfrozen or cast, the learning rate moved, and the optimizer be another
    than the ``first``, which the run's are of.
    """
    if step is None:
        return facts
    if first is not None and step.view.optimizer not in (None, first):
        facts = replace(facts, **step.view.about_optimizer())
    optimizer, rates = facts.optimizer, [r for r in step.rates if isinstance(r, float)]
    if optimizer is not None and rates:
        odd = [rate for rate in rates if not math.isfinite(rate)]
        optimizer = replace(optimizer, lr=(odd or rates)[0])
    groups = param_groups(step.view.root.named_parameters())
    compiled = facts.compiled or step.facts.compiled
    return replace(facts, param_groups=groups, optimizer=optimizer, compiled=compiled)
