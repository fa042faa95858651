"""What hosts get in place of a session when ``NANSTOP=off``: it looks at nothing and changes nothing."""

from __future__ import annotations

from typing import Any

from nanstop.decide.decision import Resolution
from nanstop.report.run_report import RunReport
from nanstop.session.history import History


class IdleSession:
    """Answers every failure with "proceed"."""

    def __init__(self) -> None:
        self.series = History()
        self.reports: list[Any] = []
        self.findings: list[Any] = []

    def prepare(self) -> None:
        """Put nothing in force."""

    def start(self) -> None:
        """Announce nothing."""

    def failed(self, *_signals: Any, **_details: Any) -> Resolution:
        """Return "proceed"."""
        return Resolution(kind="proceed")

    def completed(self, _step: int) -> None:
        """Note nothing."""

    def left_out(self, _step: int) -> None:
        """Note nothing."""

    def before_update(self, _step: Any) -> None:
        """Look at nothing."""

    def foresee(self, *_update: Any) -> None:
        """Look at nothing."""

    def gauge_due(self, _step: int) -> bool:
        """Return False."""
        return False

    def adopt(self, _atoms: Any) -> None:
        """Nothing is ever resolved, so nothing is adopted."""

    def report(self) -> RunReport:
        """Return the report of a run of which nothing is known."""
        return RunReport((), (), 0, 0.0)

    def finish(self, _exit_code: int = 0) -> None:
        """Write nothing."""
