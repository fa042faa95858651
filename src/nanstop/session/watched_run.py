"""What hosts may call of a watched run, whoever stands behind it:
a session, none, or what takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nanstop.decide.agreement import ONE_RANK, Ranks
from nanstop.decide.decision import Decision
from nanstop.records import (
    Atom,
    BatchRows,
    Diagnosis,
    GradientAccount,
    PrecisionPlan,
    Report,
    RunFacts,
    SourceLine,
    StepId,
)
from nanstop.session.history import History

if TYPE_CHECKING:
    from nanstop.detect.signals import Alarm
    from nanstop.prove.failing_step import WayBack
    from nanstop.replay.step import Batch, ModelView, Step
    from nanstop.report.announce import News
    from nanstop.report.run_report import RunReport

Writers = tuple[SourceLine, ...]
WrittenBy = Callable[[Sequence[str]], Writers]
"""Given the names of weights: what has written to them, and what to their gradients."""


class WatchedRun(Protocol):
    """One watched run. Hosts call it when the sentinel fires, before the update, and carry out the
    ``Decision``.

    A method without an answer does nothing unless it is overridden.
    """

    facts: RunFacts
    """Of the present training; a host that has read them anew sets them."""
    series: History
    metrics: History
    """Numbers of nanstop's own, as ``session.telling.numbers`` names them."""
    terms: str
    """What ranks must have in common before each acts by itself, as text."""
    present: Callable[[], StepId | None]
    """Asks the host which step the run is in."""

    announce: Callable[[News], None]
    """Told of each incident, once, and of whatever else there is to say."""
    rows_of: Callable[[Batch], BatchRows | None]
    """Asks the host which rows a micro-batch was made of."""
    decode: Callable[[Sequence[int]], str]
    """Asks the host for the text of some token ids."""
    written_by: WrittenBy
    """Asks the host what it saw write to each of some weights outside of an update, in order."""

    @property
    def reports(self) -> Sequence[Report]:
        """The incidents so far, the one that was last seen at the end."""
        ...

    @property
    def findings(self) -> Sequence[Diagnosis]:
        """What was found in the run so far beside its failures, weightiest first."""
        ...

    @property
    def in_force(self) -> tuple[Atom, ...]:
        """The remedies that are on for the rest of the run."""
        ...

    @property
    def may_leave_out(self) -> bool:
        """Whether an update of the run may be left out: by its policy, and because it can be."""
        ...

    def prepare(self) -> None:
        """Put the plan that the user gave in force, before the facts of the run are taken.
        Errors: ``NanstopError``.
        """

    def start(self, *, trains: bool = True) -> None:
        """Begin a training (again): announce standing findings and what cannot be done in it, or,
        not ``trains``, an evaluation outside of one. No device work.
        """

    def failed(
        self,
        step: Step | None,
        alarm: Alarm,
        *,
        rewind: WayBack | None = None,
        can_skip: bool = False,
        ranks: Ranks = ONE_RANK,
    ) -> Decision:
        """Investigate a failure and return what to do; everything tried is undone.

        ``can_skip``: without a ``step`` there is an update that can be left out all the same.
        ``ranks``: those that have met the same failure, and call this for it too.
        Synchronises the device.
        """
        ...

    def carried_out(
        self, decision: Decision, outcome: str, *, before: str = "", after: str = ""
    ) -> None:
        """Record what became of a decision: "done", or "failed: " and why.

        ``before`` and ``after``: the loss of the failing micro-batch, or else the norm of the
        gradients.
        """

    def completed(self, step: int, *, optimizer: int | None = None) -> None:
        """Note that an update was applied, by the ``optimizer`` of this id where several train.
        Synchronises the device where the gauge has looked at the step.
        """

    def left_out(self, step: int, *, optimizer: int | None = None) -> None:
        """Note that the run went on without this update:
        the scaler, or a decision, had it left out. ``optimizer`` as in ``completed``.
        """

    def learned(self, *, at: StepId | None = None, **facts: Any) -> None:
        """Look at the set-up once more:
        these fields of ``RunFacts`` were read anew in step ``at``, now by default.
        """

    def raised(self, at: StepId, error: BaseException) -> None:
        """Look at the set-up once more:
        the run's own code raised what is no failure of numbers, in this step.
        """

    def before_update(self, step: Step) -> Decision | None:
        """Look at a healthy window whose update is near: whether gradients arrived, and what they
        are about to move. Return that the training is to stop, where a look has come to that.
        """

    def follow(self, view: ModelView) -> None:
        """Have the run be of another model from here on; hold nothing of the last."""

    def accounted(self, account: GradientAccount) -> None:
        """Look at what became of gradients from their backward to an update that was made.
        No device work.
        """

    def foresee(self, step: Step, rewind: Callable[[], WayBack | None]) -> Decision | None:
        """Return what to do about an update of a healthy window that will ruin weights, None for
        any other.

        Asked once an update, when its gradients are final. ``rewind`` gives the way back, this step
        the last of it. Synchronises the device where the update is one of those that are rehearsed.
        """

    def may_read_late(self, step: Step) -> bool:
        """Return whether the values of a window may be read once its update was launched, which the
        device leaves out by itself where they are bad: nothing else is to be looked at before.
        No device work.
        """
        del step
        return False

    def gauge_due(self, step: int) -> bool:
        """Return whether a healthy micro-batch should be run once more for a closer look."""
        ...

    def audit(self, step: Step, ranks: Callable[[], Ranks]) -> None:
        """Compare the devices of the ranks that train a model together, where the user has asked
        for it and it is due. Every rank calls it before each healthy update.
        """

    def gauge(self, step: Step) -> None:
        """Run one micro-batch of a healthy window again, undone;
        report overflow that was absorbed.
        """

    def logged(self) -> None:
        """Look at what was just logged: a number may be an artefact of the log filter.
        Synchronises the device.

        Costs as much at each log: the rules are shown the end of each series (0.3 ms with its 512
        values).
        """

    def adopt(self, atoms: tuple[Atom, ...]) -> None:
        """Switch remedies on until the run ends, and save them as the run's plan."""

    def resume(self, plan: PrecisionPlan, source: str) -> None:
        """Adopt the plan that a checkpoint was saved under, before the first step after it."""

    def saved(self, folder: Path) -> None:
        """Write beside weights that were saved there what they need to compute finite."""

    def checkpoint_refused(self, path: str, bad_params: Sequence[str], last_good: str) -> Decision:
        """Report a checkpoint that would have held non-finite values;
        return whether training is to stop.
        """
        ...

    def finish(self, exit_code: int = 0) -> None:
        """Undo what was adopted and write the last summary.
        ``exit_code``: ``STOPPED`` after a decision to stop.
        """

    def report(self) -> RunReport:
        """Return everything that happened so far."""
        ...


OpenSession = Callable[["ModelView", RunFacts], WatchedRun]
"""Called once by a host, when model and optimizer are those that train."""
