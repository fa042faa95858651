"""Runs any training command in a child process that is watched.

Its streams and its exit code stay its own.

Only a training that nanstop stops, and that the command does not answer for itself, ends with
``STOPPED``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Timer
from types import FrameType
from typing import Any

from nanstop.commands.run.supervise import supervised
from nanstop.decide.decision import STOPPED
from nanstop.decide.policy import Policy
from nanstop.errors import NanstopError
from nanstop.language.translate import translated
from nanstop.process.children.command import mention_ours, resolve_command
from nanstop.process.crash.process_end import ProcessEnd
from nanstop.process.crash.standing_still import Patience
from nanstop.process.inject.variables import watching
from nanstop.ranks import is_first
from nanstop.records import Report
from nanstop.records.codec import to_json
from nanstop.session.factory import SERIES_VARIABLE, incident_folder, switched_off
from nanstop.store.incidents import Store
from nanstop.store.summary import Summary, summary_row

GRACE_SECONDS = 2.0
"""How long the child may take to end by a signal before we pass ours on;
a repeated one is passed on at once.
"""

_OURS_ALONE = ("--on-failure", "--on-stop", "--allow", "--show-text", "--hang", "--audit-devices")
"""Options that a command hardly has itself."""
NOTHING_WATCHED = (
    "nanstop: nothing was watched: neither a Trainer nor an optimizer of torch has made a step "
    "with gradients outside of what `torch.compile` has compiled, or of the first call of a model\n"
)


def launch(
    command: Sequence[str],
    *,
    policy: Policy,
    out: str | os.PathLike[str] | None = None,
    as_json: bool = False,
    record: bool = False,
    series: bool = False,
    patience: Patience | None = None,
) -> int:
    """Run ``command`` watched and return its exit code.

    128 + n, as a shell says it, if signal n ended it.

    ``STOPPED`` where nanstop stopped the training: by a ``TrainingStopped`` that the command did
    not catch, or, if the policy is to end it, without one.

    ``as_json``: the run's summary follows on stdout. ``record``: note every operation before it
    runs. ``series``: keep the numbers of the whole run, for ``nanstop compare``. ``patience``: when
    a run without progress is ended; None for never. Errors: ``NanstopError`` NS001 for a command
    that cannot be started.
    """
    resolved = resolve_command(command)
    mention_ours(command, _OURS_ALONE)
    if switched_off():
        with ExitStack() as listening:
            wait = subprocess.Popen.wait
            return _shell_code(_run(resolved, dict(os.environ), wait, listening)[0])
    folder = incident_folder(out).absolute()
    run_id = os.urandom(8).hex()
    store = Store(folder, run_id)
    if is_first():  # of several that a launcher has started, each under a `nanstop run`
        store.reset()
    began = time.monotonic()
    watched = _environment(policy, folder, run_id, series=series)
    with ExitStack() as listening:  # until all is written: a launcher ends all ranks with the first
        with supervised(store, record=record, patience=patience) as supervisor:
            variables = {**watched, **supervisor.variables}
            wait, asked = supervisor.wait, supervisor.interrupting
            code, interrupted = _run(resolved, variables, wait, listening, asked)
            summary = _summary_so_far(store)
            end, report = supervisor.ended(
                code,
                interrupted=interrupted,
                failed=bool(summary.incidents),
                stopped=policy.on_stop == "end" and summary.ended == "stopped",
            )
        if code == 0 and summary == Summary() and store.problem is None and not policy.quiet:
            sys.stderr.write(translated(NOTHING_WATCHED))
        if report is not None:
            _announce(folder, report)
            summary = replace(summary, incidents=(*summary.incidents, summary_row(report)))
        shown = STOPPED if end.kind == "stopped" else _shell_code(code)
        summary = _close(store, summary, end, shown, time.monotonic() - began)
        if report is not None:
            _write_page(folder)
        if as_json:
            sys.stdout.write(f"{to_json(summary)}\n")
        return shown


def _environment(policy: Policy, folder: Path, run_id: str, *, series: bool) -> dict[str, str]:
    """Return the environment of the command, in which it is watched."""
    given = dict(os.environ)
    watched = given | watching(policy, folder, run_id, given.get("PYTHONPATH", ""))
    return watched | {SERIES_VARIABLE: "1"} if series else watched


def _announce(folder: Path, report: Report) -> None:
    from nanstop.report.announce import announcer  # most runs have nothing to tell

    announcer(folder)(report)


def _write_page(folder: Path) -> None:
    from nanstop.report.page_file import write_folder_page  # as above

    write_folder_page(folder)


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    wait: Callable[[subprocess.Popen[Any]], int],
    listening: ExitStack,
    asked: Callable[[], None] = lambda: None,
) -> tuple[int, bool]:
    """Return the exit code as ``Popen`` says it, and whether the command was asked to end
    through us. Until ``listening`` is closed, what asks this process to end is for the command, and
    ``asked`` is called with it.
    """
    try:
        child = subprocess.Popen(command, env=dict(environment))
    except OSError as error:
        raise NanstopError(f"cannot start {command[0]}: {error.strerror or error}") from error
    forwarded = listening.enter_context(_forwarding(child, asked))
    return wait(child), bool(forwarded)


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding(
    child: subprocess.Popen[Any], asked: Callable[[], None]
) -> Iterator[Mapping[int, Timer]]:
    """Pass SIGTERM and SIGINT on; yield those that came. ``asked`` is called with each.

    What is typed at the terminal reaches the child without us.

    So does what `timeout` or a scheduler sends to the whole group, and nothing tells that from a
    signal to us alone: the child gets time to end by itself, because a second one would interrupt
    it while it saves its work.
    """
    pending: dict[int, Timer] = {}

    def forward(number: int, _frame: FrameType | None) -> None:
        asked()
        if number == signal.SIGINT and _typed():
            return
        before = pending.get(number)
        if before is not None:
            before.cancel()  # the child gets what came twice once
        wait = GRACE_SECONDS if before is None else 0.0
        pending[number] = Timer(wait, child.send_signal, (number,))
        pending[number].start()

    handlers = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield pending
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for timer in pending.values():
            timer.cancel()


def _typed() -> bool:
    """Return whether a SIGINT now comes from the terminal, which sends it to the whole
    foreground group.
    """
    if not hasattr(os, "tcgetpgrp"):  # Windows: Ctrl-C reaches every process of the console
        return True
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


def _summary_so_far(store: Store) -> Summary:
    """Return what the run's processes have written.

    An empty summary if nothing of it was ever watched.
    """
    try:
        return store.present_summary()
    except NanstopError:
        return Summary()


def _close(store: Store, summary: Summary, end: ProcessEnd, code: int, seconds: float) -> Summary:
    """Write down how the run ended."""
    steps = end.files.flight.step if end.files is not None else 0
    summary = replace(
        summary,
        ended=end.kind,
        exit=code,
        steps=max(summary.steps, steps),
        seconds=max(summary.seconds, seconds),
    )
    store.write_summary(summary)
    return summary
