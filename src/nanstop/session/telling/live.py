"""What a run tells whoever follows it, and costs nobody else anything: see ``store.live_file``.

Now and then it is asked for, as seldom as ``telling.pace`` says. The terminal is told as often.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanstop.frozen import frozen
from nanstop.records.remedies import describe
from nanstop.report.text.progress import Stage
from nanstop.session.history import History
from nanstop.session.telling.pace import Pace
from nanstop.session.telling.terminal_line import TerminalLine
from nanstop.store.live_file import LiveFile, Wish

if TYPE_CHECKING:
    from pathlib import Path

    from nanstop.records import Trial

_SECONDS_OF_BYTE = 2.0**-20
"""Between two lines, for each byte written before: a file of 16 MiB grows every 16 seconds."""
_MOST_POINTS = 120
"""Of a series in one line."""
_AT_THE_TERMINAL = ("headroom", "scale", "skipped")
_log = logging.getLogger("nanstop")


@frozen
class Search:
    """The search for a cure that is under way: what it may take."""

    trials: int
    seconds: float


class Live:
    """The live file of one run, where somebody wants it. Never raises.

    ``histories``: whose new values are written. Not ``writes``: nothing is ever done. ``quiet``:
    nothing is said at the terminal.
    """

    def __init__(
        self,
        folder: Path,
        histories: Sequence[History],
        *,
        writes: bool = True,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        processor: Callable[[], float] = time.thread_time,
    ) -> None:
        self._line = TerminalLine() if writes and not quiet else None
        self._folder = folder
        self._histories = histories
        self._clock = clock
        self._wish = Wish(folder)
        self._header: dict[str, Any] = {}
        self._file: LiveFile | None = None
        self._writes = writes
        self._pace = Pace(clock, processor)
        if not writes:
            self._pace.stop()
        self._is_first = True
        """The first line makes the file and imports what is needed."""
        self._told: list[dict[str, int]] = [{} for _ in histories]
        self._stage: Stage | None = None
        self._stage_ends = math.inf

    def begin(self, **header: Any) -> None:
        """Note that a training begins: what is told of it goes into a file of its own."""
        self._header = header
        self._close()
        if self._writes:
            self._pace.hurry()
        self._told = [history.counts() for history in self._histories]
        self._guarded(lambda: self._tell({}))

    def stepped(self, step: int) -> None:
        """Tell what is new once a step is over, where it is time for it. Synchronises the device
        where values of a run that is followed lie on one.
        """
        if not self._pace.is_due():
            return
        self._guarded(lambda: self._tell({"step": step}, numbers=True))
        if self._line is not None:
            self._line.stepped(step + 1, self._standing())
        if self._writes:
            written = self._file.num_bytes if self._file is not None else 0
            self._pace.done(counts=not self._is_first, least=written * _SECONDS_OF_BYTE)
            self._is_first = False

    def stage(self, name: str, step: int, search: Search | None = None) -> None:
        """Tell which stage an investigation is in, "" for the end of it."""
        self._stage = Stage(name=name, step=step, trials=search.trials if search else 0)
        self._stage_ends = self._clock() + search.seconds if search else math.inf
        bounds = {"trials": search.trials, "seconds": search.seconds} if search else {}
        self._guarded(lambda: self._tell({"stage": name, "of": step, **bounds}))
        self._at_the_terminal()

    def tried(self, trial: Trial) -> None:
        """Tell of one more trial of the search that is under way."""
        before = self._stage or Stage(name="proof", step=0)
        best = describe(trial.atoms) if trial.outcome == "pass" else before.best
        now = self._stage = replace(before, name="proof", tried=before.tried + 1, best=best)
        done = {"stage": now.name, "of": now.step, "tried": now.tried, "best": now.best}
        self._guarded(lambda: self._tell(done))
        self._at_the_terminal()

    def _at_the_terminal(self) -> None:
        if self._line is None or self._stage is None:
            return
        left = self._stage_ends - self._clock()
        known = None if math.isinf(left) else max(left, 0.0)
        self._line.stage(replace(self._stage, seconds_left=known))

    def end(self, exit_code: int) -> None:
        """Tell what is left, and that the training is over."""
        self._guarded(lambda: self._tell({"end": exit_code}, numbers=True))
        if self._line is not None:
            self._line.clear()
        self._close()

    def _tell(self, entry: dict[str, Any], *, numbers: bool = False) -> None:
        if not self._writes or not self._wish.is_fresh(self._clock()):
            return
        if self._file is None:
            self._is_first = True
            self._file = LiveFile(self._folder, self._header)
        if numbers:
            entry |= {"series": dict(self._new())}
        if entry:
            self._file.append(entry)

    def _new(self) -> Iterator[tuple[str, list[tuple[int, float]]]]:
        from nanstop.report.html.series import thinned

        for place, history in enumerate(self._histories):
            rows, self._told[place] = history.since(self._told[place])
            for name, points in rows.items():
                told = thinned(points, most=_MOST_POINTS)
                yield name, [(step, float(f"{value:.6g}")) for step, value in told]

    def _standing(self) -> dict[str, float]:
        """Return the last of the numbers that the terminal shows. No synchronisation."""
        found: dict[str, float] = {}
        for kept in self._histories:
            for name in _AT_THE_TERMINAL:
                value = kept.last_number(name)
                if value:
                    found[name] = float(value)
        return found

    def _guarded(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # a follower is never the reason a run dies
            self._writes = False
            self._pace.stop()
            kind = type(error).__name__
            _log.warning("nanstop: this run can no longer be followed (%s: %s)", kind, error)
            self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
