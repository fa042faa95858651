"""``nanstop bisect``: the smallest difference between a training that fails and one that does not,
by running both.

Each trial is a child process that is watched and only observed, so that a value that stops being
finite is an outcome like a signal or an exception. What is finished is on disk at once: an
interrupted bisect goes on where it was.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from nanstop.commands.bisect.configs import Pair
from nanstop.commands.bisect.result import (
    BisectResult,
)
from nanstop.commands.bisect.search import Bisection, bisect
from nanstop.commands.bisect.trial_store import (
    TrialStore,
)
from nanstop.commands.bisect.trials import ChildTrials, ForksDifferError, Limits
from nanstop.process.children.executors import executor
from nanstop.process.children.isolate import require_bounds
from nanstop.session.factory import incident_folder

FOLDER = "bisect"


def run_bisect(
    pair: Pair,
    *,
    limits: Limits,
    where: str = "fork",
    folder: str | os.PathLike[str] | None = None,
    announce: Callable[[str], None] = lambda _: None,
) -> BisectResult:
    """Run the trials that tell which keys of ``pair`` make the bad configuration fail, and return
    what they say.

    ``folder``: the incident folder, ``$NANSTOP_DIR`` or ``.nanstop`` by default; trials live in
    ``bisect`` below it. ``where``: name of the executor (see ``executors``). ``announce`` gets a
    line for each trial. Interrupted, it ends the running trials and raises ``KeyboardInterrupt``;
    the finished ones are used again by the next call. Errors: ``NanstopError`` NS001 where trials
    cannot be written, or not be bounded here.
    """
    require_bounds(limits.memory_bytes)
    place = (Path(folder) if folder is not None else incident_folder()).absolute() / FOLDER
    store = TrialStore(place, pair.words())
    began = time.monotonic()
    trials = ChildTrials(pair, store, limits, announce, executor(where))
    try:
        with store.held(), _ended_by_sigterm(), closing(trials.executor):
            found = _search(trials)
    except KeyboardInterrupt:
        announce(f"interrupted: {len(trials.rows)} trials are kept in {place} and not run again")
        raise
    return trials.result(found, time.monotonic() - began)


def _search(trials: ChildTrials) -> Bisection:
    """Return what the trials tell. Where forks deceive, none of them counts."""
    keys, limits = list(trials.pair.items), trials.limits
    try:
        return bisect(keys, trials.run, width=limits.jobs, limit=limits.trials)
    except ForksDifferError:
        trials.executor.stop_forking("a forked trial ended otherwise than one started by itself")
        return bisect(keys, trials.run, width=limits.jobs, limit=limits.trials)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end the running trials as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
