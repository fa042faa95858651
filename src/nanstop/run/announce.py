"""What a session tells the person at the terminal, as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from nanstop.records import Diagnosis, Report
from nanstop.report import text


def announcer(folder: Path) -> Callable[[Report | Diagnosis | str], None]:
    """Return what prints reports, findings and notes on stderr as they come."""

    def announce(news: Report | Diagnosis | str) -> None:
        if isinstance(news, Report):
            shown = text.render(news, record=str(folder / news.incident.id / "report.json"))
        elif isinstance(news, Diagnosis):
            shown = text.render_finding(news)
        else:
            shown = f"nanstop: {news}\n"
        sys.stderr.write(shown if shown.endswith("\n") else f"{shown}\n")
        sys.stderr.flush()

    return announce
