"""All that happened in a run, as one object to print or to show in a notebook."""

from __future__ import annotations

from dataclasses import dataclass

from nanstop.records import Diagnosis, Report, Series
from nanstop.report.text import terminal
from nanstop.store.summary import Summary, summary_of
from nanstop.wording import counted, number


@dataclass(frozen=True, slots=True)
class RunReport:
    """``str`` gives the terminal's text; a notebook shows HTML.
    ``exit``: None while it goes on. ``series``: the last numbers.
    """

    incidents: tuple[Report, ...]
    findings: tuple[Diagnosis, ...]
    steps: int
    seconds: float
    stopped: bool = False
    exit: int | None = None
    series: tuple[Series, ...] = ()

    def __str__(self) -> str:
        parts = [terminal.render(report) for report in self.incidents]
        parts += [terminal.render_finding(finding) for finding in self.findings]
        return "\n".join([*parts, self._summary()])

    def __repr__(self) -> str:
        took = f"{number(round(self.seconds, 1))} s"
        return f"<run of {took}: {self.outcome}{', then stopped' if self.stopped else ''}>"

    @property
    def outcome(self) -> str:
        """How many steps, incidents and findings there were, in words."""
        found = ((self.incidents, "incident"), (self.findings, "finding"))
        parts = [counted(self.steps, "step"), *(counted(len(rows), name) for rows, name in found)]
        return ", ".join(parts)

    def _summary(self) -> str:
        return terminal.render_summary(
            self.incidents,
            self.findings,
            steps=self.steps,
            seconds=self.seconds,
            stopped=self.stopped,
        )

    def _repr_html_(self) -> str:
        """Return the page of the run as HTML for a notebook, everything escaped."""
        from nanstop.report.html.notebook import run_html, sheet_html
        from nanstop.report.html.run_record import RunRecord
        from nanstop.report.html.sheet import findings_sheet

        if self.incidents:
            run = RunRecord(reports=self.incidents, series=self.series, summary=self._as_written())
            return run_html(run)
        said = self._summary()
        return sheet_html(findings_sheet(self.findings, said, title="nanstop", series=self.series))

    def _as_written(self) -> Summary:
        return summary_of(
            self.incidents,
            self.findings,
            stopped=self.stopped,
            exit=self.exit,
            steps=self.steps,
            seconds=self.seconds,
        )


class Findings(tuple[Diagnosis, ...]):
    """What was found, the most certain first: a tuple that a notebook shows as HTML."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        from nanstop.report.html.notebook import findings_html
        from nanstop.wording import counted

        return findings_html(self, counted(len(self), "finding") if self else "nothing found")
