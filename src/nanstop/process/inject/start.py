"""The first call of nanstop in a process that it was put into.

Watch what is trained there, or do a job in its place.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import Any

from nanstop.hosts.script import autowatch
from nanstop.process.inject.variables import DRY_RUN
from nanstop.process.signals import stay_interrupted

_log = logging.getLogger("nanstop")


def start() -> None:
    """Begin what the environment asks for.

    Called again after another import, add what that makes possible.
    """
    if DRY_RUN in os.environ:
        _do_job()
    elif (known := autowatch.opener()) is not None:
        autowatch.install(known)
    else:
        atexit.register(stay_interrupted)  # the first to be registered is called last
        _outlive()
        autowatch.tell(_ChildEnd().opened)
        autowatch.install(_open_session)


def _do_job() -> None:
    """Have the job of the dry run stand in for the first training of a trainer or a loop."""
    from nanstop.process.inject import dry_run_child
    from nanstop.process.inject.dry_run import current_dry_run

    dry_run = current_dry_run()
    assert dry_run is not None
    trainer_class = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer_class is not None:
        dry_run_child.install(autowatch.table, trainer_class, dry_run)
    if "torch" in sys.modules and autowatch.opener() is None:
        opener = dry_run_child.loop_opener(dry_run, autowatch.table)
        if opener is not None:
            autowatch.install(opener)


def _outlive() -> None:
    """Begin what outlives this process.

    Its steps, and its operations where they are to be recorded.
    """
    from nanstop.process.crash import process_files

    try:
        files = process_files.begin()
    except OSError as error:  # a full or missing folder of temporary files
        _log.warning("nanstop: nothing of this process will outlive it (%s)", error)
    else:
        if files is not None:
            autowatch.tell(files.opened)


class _ChildEnd:
    """Finishes what is watched in a child of ``multiprocessing`` as it ends: one that was forked
    calls no exit handlers of Python's, but finalizers of its own
    (https://docs.python.org/3/library/atexit.html).
    """

    def __init__(self) -> None:
        self._process = 0

    def opened(self, _: Any) -> None:
        """Note that a training begins in this process."""
        if os.getpid() == self._process:
            return
        self._process = os.getpid()
        import multiprocessing.util

        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(None, self._end, exitpriority=0)

    def _end(self) -> None:
        error = sys.exc_info()[1]  # what ends the process: nothing but multiprocessing hears of it
        if error is not None and getattr(error, "code", 1):
            sys.last_value = error
        autowatch.finish()
        atexit.unregister(autowatch.finish)


def _open_session(view: Any, facts: Any) -> Any:
    """Open a session as the environment says.

    What a session needs is imported when training begins.
    """
    from nanstop.process.inject.variables import watched_policy
    from nanstop.report.announce import announcer
    from nanstop.session.factory import opener, run_store

    store = run_store()
    policy, announce = watched_policy(os.environ), announcer(store.folder)
    return opener(policy, store, announce, opened=autowatch.opened)(view, facts)
