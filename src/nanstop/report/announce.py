"""What a session tells the person at the terminal, as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from nanstop.ranks import is_first
from nanstop.records import Diagnosis, Report
from nanstop.report.text.run_end import RunEnd, end_line
from nanstop.store.incidents import REPORT

News = Report | Diagnosis | RunEnd | str


def announcer(folder: Path) -> Callable[[News], None]:
    """Return what prints reports, findings, notes and the end of a run on stderr as they come.

    Of several processes that train together each reports its own failures;
    what holds for all of them the first says.
    """
    speaks_for_all = is_first()

    def announce(news: News) -> None:
        from nanstop.report.text import terminal  # most runs have nothing to tell

        if isinstance(news, Report):
            record = _record(folder / news.incident.id / REPORT)
            shown = terminal.render(news, record=record, stream=sys.stderr)
        elif not speaks_for_all:
            return
        elif isinstance(news, Diagnosis):
            shown = terminal.render_finding(news, stream=sys.stderr)
        else:
            said = end_line(news) if isinstance(news, RunEnd) else news
            shown = terminal.render_note(f"nanstop: {said}", stream=sys.stderr)
        with _bars_aside():
            sys.stderr.write(shown if shown.endswith("\n") else f"{shown}\n")
            sys.stderr.flush()

    return announce


@contextmanager
def _bars_aside() -> Iterator[None]:
    """Take the bars of tqdm's away from the terminal, where a script shows any, and draw them anew
    below what was written meanwhile.

    Where it shows none, nothing is asked of tqdm: its lock is a semaphore of ``multiprocessing``,
    which nothing releases that was made as a process ends.
    """
    tqdm: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with ExitStack() as stack:
        if getattr(tqdm, "_instances", ()):
            with suppress(Exception):  # something else of that name
                stack.enter_context(tqdm.external_write_mode(file=sys.stderr))
        yield


def _record(path: Path) -> str | None:
    """Return where the full record is, None where the disk refused it."""
    return short(path) if path.is_file() else None


def short(path: Path) -> str:
    """Return a path as short as it can be said where we are."""
    with suppress(ValueError, OSError):
        return str(path.relative_to(Path.cwd()) if path.is_absolute() else path)
    return str(path)
