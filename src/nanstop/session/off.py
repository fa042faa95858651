"""What hosts get in place of a session when ``NANSTOP=off``: it looks at nothing and changes
nothing.
"""

# ruff: noqa: ARG002 (it does nothing with what it is told)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from nanstop.decide.decision import Decision
from nanstop.records import Atom, BatchRows, Diagnosis, Report, RunFacts, StepId
from nanstop.report.run_report import RunReport
from nanstop.session.history import History
from nanstop.session.watched_run import WatchedRun, WrittenBy

if TYPE_CHECKING:
    from nanstop.detect.signals import Alarm
    from nanstop.replay.step import Batch, Step
    from nanstop.report.announce import News


class OffSession(WatchedRun):
    """Answers every failure with "proceed";
    those that stand in for a session override what they have to do.
    """

    def __init__(self) -> None:
        self.facts, self.terms = RunFacts(), ""
        self.series, self.metrics = History(), History()
        self.present: Callable[[], StepId | None] = lambda: None
        self.announce: Callable[[News], None] = lambda _: None
        self.rows_of: Callable[[Batch], BatchRows | None] = lambda _: None
        self.decode: Callable[[Sequence[int]], str] = str
        self.written_by: WrittenBy = lambda _: ()

    @property
    def reports(self) -> Sequence[Report]:
        return ()

    @property
    def findings(self) -> Sequence[Diagnosis]:
        return ()

    @property
    def in_force(self) -> tuple[Atom, ...]:
        return ()

    @property
    def may_leave_out(self) -> bool:
        return False

    def failed(self, step: Step | None, alarm: Alarm, **_about: Any) -> Decision:
        return Decision(kind="proceed")

    def gauge_due(self, step: int) -> bool:
        return False

    def checkpoint_refused(self, path: str, bad_params: Sequence[str], last_good: str) -> Decision:
        return Decision(kind="proceed")

    def report(self) -> RunReport:
        return RunReport((), (), 0, 0.0)
