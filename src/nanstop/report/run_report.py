"""All that happened in a run, as one object to print or to show in a notebook."""

from __future__ import annotations

from dataclasses import dataclass

from nanstop.records import Diagnosis, Report
from nanstop.report.html import notebook
from nanstop.report.text import terminal


@dataclass(frozen=True, slots=True)
class RunReport:
    """``str`` gives the terminal's text; a notebook shows HTML."""

    incidents: tuple[Report, ...]
    findings: tuple[Diagnosis, ...]
    steps: int
    seconds: float
    stopped: bool = False

    def __str__(self) -> str:
        parts = [terminal.render(report) for report in self.incidents]
        parts += [terminal.render_finding(finding) for finding in self.findings]
        parts.append(
            terminal.render_summary(
                self.incidents,
                self.findings,
                steps=self.steps,
                seconds=self.seconds,
                stopped=self.stopped,
            )
        )
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        """Return the reports of all incidents as HTML for a notebook, everything escaped."""
        if not self.incidents:
            return notebook.preformatted(str(self))
        return "".join(notebook.html(report) for report in self.incidents)
