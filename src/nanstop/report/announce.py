"""What a session tells the person at the terminal, as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from nanstop.ranks import is_first
from nanstop.records import Diagnosis, Report
from nanstop.store.incidents import REPORT


def announcer(folder: Path) -> Callable[[Report | Diagnosis | str], None]:
    """Return what prints reports, findings and notes on stderr as they come.

    Of several processes that train together each reports its own failures;
    what holds for all of them the first says.
    """
    speaks_for_all = is_first()

    def announce(news: Report | Diagnosis | str) -> None:
        from nanstop.report.text import terminal  # most runs have nothing to tell

        if isinstance(news, Report):
            record = _record(folder / news.incident.id / REPORT)
            shown = terminal.render(news, record=record, stream=sys.stderr)
        elif not speaks_for_all:
            return
        elif isinstance(news, Diagnosis):
            shown = terminal.render_finding(news, stream=sys.stderr)
        else:
            shown = f"nanstop: {news}\n"
        sys.stderr.write(shown if shown.endswith("\n") else f"{shown}\n")
        sys.stderr.flush()

    return announce


def _record(path: Path) -> str | None:
    """Return where the full record is, as short as can be; None where the disk refused it."""
    if not path.is_file():
        return None
    with suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()) if path.is_absolute() else path)
    return str(path)
