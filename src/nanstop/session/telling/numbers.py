"""The few numbers of nanstop's own that are worth a line in whatever tracks a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from nanstop.session.telling.pace import LEAST_SECONDS, Pace
from nanstop.session.watched_run import WatchedRun

if TYPE_CHECKING:
    from nanstop.session.session import Session

PREFIX = "nanstop/"
NAMES = {
    "headroom": f"{PREFIX}headroom_bits",
    "lost": f"{PREFIX}share_of_update_lost",
    "skipped": f"{PREFIX}updates_left_out",
}
"""What the metrics of a run are called elsewhere."""
TrackerLog = Callable[[Mapping[str, float], int], object]
_log = logging.getLogger("nanstop")


def numbers(run: WatchedRun, *, reads: bool = False) -> dict[str, float]:
    """Return a run's own numbers as they were last measured, {} where there is nothing to say.

    ``nanstop/headroom_bits``: doublings that the narrowest module has left, in half precision.
    ``nanstop/share_of_update_lost``: of a sample of half-precision weights, 0 to 1.
    ``nanstop/loss_scale``, where there is a scaler. ``nanstop/updates_left_out`` and
    ``nanstop/incidents``: how many so far, once there is one. Without ``reads`` nothing that lies
    on a device is told, which it would synchronise: a loss scale there.
    """
    found: dict[str, float] = {}
    for kept, name in NAMES.items():
        value = run.metrics.last_number(kept, reads=reads)
        if value is not None:
            found[name] = float(value)
    scale = run.series.last_number("scale", reads=reads)
    if scale is not None:
        found[f"{PREFIX}loss_scale"] = float(scale)
    if run.reports:
        found[f"{PREFIX}incidents"] = float(len(run.reports))
    return found


class NumbersLogged:
    """Calls the user's ``log(numbers, step)`` once the numbers of a run have changed. A ``log``
    that raises is not called again.

    It is looked at once an incident is met, when the run ends, and else as seldom as ``pace`` says.
    """

    def __init__(self, log: TrackerLog, pace: Pace | None = None) -> None:
        self._log = log
        self._pace = pace or Pace(rest=LEAST_SECONDS)
        self._run: Session | None = None
        self._before: Callable[[int | None], None] = lambda _: None
        self._told: dict[str, float] = {}
        self._step, self._num_incidents = 0, 0

    def follow(self, session: Session) -> None:
        """Be told of each step of a training that begins."""
        if session.beat != self._beat:
            self._before, session.beat = session.beat, self._beat
        self._run, self._told = session, {}
        self._step, self._num_incidents = 0, 0
        self._pace.hurry()

    def _beat(self, step: int | None) -> None:
        self._before(step)
        run = self._run
        if run is None:
            return
        is_due = step is not None and self._pace.is_due()
        if step is not None:
            self._step = step
            if not is_due and len(run.reports) == self._num_incidents:
                return
        self._num_incidents = len(run.reports)
        found = numbers(run)
        self._pace.done(counts=is_due)
        if found != self._told:
            self._told = found
            self._tell(found)

    def _tell(self, found: Mapping[str, float]) -> None:
        try:
            self._log(found, self._step)
        except Exception as error:  # of the user's own; a run does not die of its log
            self._run = None
            kind = type(error).__name__
            _log.warning("nanstop: `log` is not called again (%s: %s)", kind, error)


def also_logged(
    opened: Callable[[Session], None], log: TrackerLog | None
) -> Callable[[Session], None]:
    """Return what is told of each training that begins: ``opened``, and the user's ``log``."""
    if log is None:
        return opened
    logged = NumbersLogged(log)

    def both(session: Session) -> None:
        opened(session)
        logged.follow(session)

    return both
