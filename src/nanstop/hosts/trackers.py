"""What trackers are given of an incident: an alert, an artifact, a text beside the curves.

It is what is made for public issues: without secrets, folders, strings and texts of data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nanstop.records import Report
from nanstop.replay.rng import rng_kept
from nanstop.report.text.issue import headline, issue

if TYPE_CHECKING:
    from nanstop.session.watched_run import WatchedRun

_log = logging.getLogger("nanstop")


@dataclass(frozen=True, slots=True)
class Note:
    """An incident to read: Markdown. ``step``: of the optimizer, from 0."""

    incident: str
    title: str
    text: str
    step: int


Send = Callable[[Note], object]


def to_wandb(run: Any) -> Send:
    """Return what gives a note to a run of Weights & Biases: as an alert and as an artifact."""

    def send(note: Note) -> None:
        run.alert(title=note.title, text=note.text, level="ERROR")
        with TemporaryDirectory() as folder:
            file = Path(folder, "incident.md")
            file.write_text(note.text, encoding="utf-8")
            name = f"nanstop-{run.id}-{note.incident}"
            run.log_artifact(str(file), name=name, type="nanstop-incident")

    return send


def to_tensorboard(writer: Any) -> Send:
    """Return what writes a note into event files."""

    def send(note: Note) -> None:
        writer.add_text(f"nanstop/incident {note.incident}", note.text, note.step)
        writer.flush()

    return send


def to_mlflow(client: Any, run_id: str) -> Send:
    """Return what puts a note among the artifacts of a run of MLflow."""
    return lambda note: client.log_text(run_id, note.text, f"nanstop/{note.incident}.md")


def to_trackio(trackio: Any) -> Send:
    """Return what gives a note to the present run of Trackio, as an alert."""
    level = trackio.AlertLevel.ERROR
    return lambda note: trackio.alert(title=note.title, text=note.text, level=level)


class Incidents:
    """Gives each new incident of a session to what ``sends`` yields by then. One that raises is
    not asked again. The state of random numbers stays as it was.
    """

    def __init__(self, sends: Callable[[], Iterable[tuple[str, Send]]]) -> None:
        self._sends = sends
        self._session: WatchedRun | None = None
        self._announce: Callable[[Any], None] = lambda _: None
        self._refused: set[str] = set()

    def follow(self, session: WatchedRun) -> None:
        """Be told of the incidents of a session, until ``end``."""
        self.end()
        self._session, self._announce = session, session.announce
        session.announce = self._told

    def end(self) -> None:
        """Be told no more."""
        session, self._session = self._session, None
        if session is not None and session.announce == self._told:
            session.announce = self._announce

    def _told(self, news: Any) -> None:
        self._announce(news)
        if not isinstance(news, Report) or self._session is None:
            return
        with rng_kept():
            try:
                self._send(news)
            except Exception as error:  # a tracker is never the reason a run dies
                self._refuse("a tracker", error)

    def _send(self, report: Report) -> None:
        at = report.incident
        note = Note(at.id, headline(report), issue(report), at.at.step)
        for name, send in self._sends():
            if name in self._refused:
                continue
            try:
                send(note)
            except Exception as error:  # of the tracker's own
                self._refuse(name, error)

    def _refuse(self, name: str, error: Exception) -> None:
        self._refused.add(name)
        kind = type(error).__name__
        _log.warning("nanstop: %s was not given an incident (%s: %s)", name, kind, error)
