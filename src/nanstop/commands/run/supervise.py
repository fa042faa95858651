"""The parent of a training: waits for it, notices that it stands still, and says how it ended.

A death that leaves no Python exception (a signal, the out-of-memory killer, a hang) becomes an
incident like any other, told from the flight file, Python's own report of a fatal signal and the
counters of the kernel.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanstop.process.crash import process_files
from nanstop.process.crash.process_end import ProcessEnd, ProcessFiles, classify, collect
from nanstop.process.oom import killed_by_kernel, num_oom_kills
from nanstop.records import Report
from nanstop.store.files import write_whole
from nanstop.store.incidents import Store

ARMED = "record-next-run"
"""A file of this name in the incident folder:
a run died without a word, and the next one is recorded.
"""
STACKS = "stacks.txt"

_FOR_GOOD = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Ends a process that does not end when it is asked to; on Windows every signal does."""

MIN_STEPS = 4
"""Completed steps before anything is known of how long one takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """A run hangs when no step was completed for ``steps`` times the median step time, ``seconds``
    at least.

    ``poll``: seconds between two looks.
    ``grace``: seconds from asking a process to end to ending it.
    """

    steps: float
    seconds: float = 60.0
    poll: float = 1.0
    grace: float = 10.0


class Supervisor:
    """Watches one command from outside. Made by ``supervised``, which cleans up after it."""

    def __init__(
        self, store: Store, folder: Path | None, *, record: bool, patience: Patience | None
    ):
        self.recording = record or (store.folder / ARMED).exists()
        self._store = store
        self._folder = folder
        self._patience = patience
        self._oom_kills = num_oom_kills()
        self._hung: tuple[ProcessFiles, str] | None = None
        self._direct = 0

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables by which the processes below leave something behind."""
        if self._folder is None:
            return {}
        recording = {process_files.RECORD: "1"} if self.recording else {}
        return {process_files.FOLDER: str(self._folder), **recording}

    def wait(self, child: subprocess.Popen[Any]) -> int:
        """Return the child's exit code as ``Popen`` says it, after ending it if it hangs."""
        self._direct = child.pid
        if self._patience is None or self._folder is None:
            return child.wait()
        while True:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=self._patience.poll)
            self._hung = self._standing_still(self._patience)
            if self._hung is not None:
                return self._end(child, self._patience)

    def ended(
        self,
        code: int,
        *,
        interrupted: bool = False,
        failed: bool = False,
        stopped: bool = False,
    ) -> tuple[ProcessEnd, Report | None]:
        """Return how the command ended and, where no exception tells the story, the report of it,
        written.

        ``interrupted``, ``failed`` and ``stopped`` as in ``classify``. A run that died is recorded
        from its next start on, until one ends cleanly.
        """
        orderly = code == 0 and self._hung is None
        processes = (
            collect(self._folder, with_facts=not orderly) if self._folder is not None else ()
        )
        evidence = self._memory_evidence(processes, code)
        end = classify(
            code,
            processes,
            direct=self._direct,
            hung=self._hung,
            interrupted=interrupted,
            killed_for_memory=bool(evidence),
            failed=failed,
            stopped=stopped,
        )
        if end.kind == "clean":
            with suppress(OSError):
                (self._store.folder / ARMED).unlink()
        if end.kind not in ("signal", "oom_killed", "out_of_memory", "hang"):
            return end, None
        report = self._write(end, evidence)
        if not self.recording and end.kind != "out_of_memory":
            with suppress(OSError):
                write_whole(self._store.folder / ARMED, b"")
        return end, report

    def _write(self, end: ProcessEnd, evidence: Sequence[str]) -> Report:
        from nanstop.process.crash.crash_report import (
            crash_report,  # a healthy run needs none of the rules
        )

        incident_id, path = self._store.open_incident()
        report = crash_report(
            end,
            incident_id=incident_id,
            run_id=self._store.run_id or "",
            evidence=evidence,
            recorded=self.recording,
        )
        if end.files is not None and end.files.stacks:
            with suppress(OSError):
                write_whole(path / STACKS, end.files.stacks.encode())
        self._store.write_report(report)
        return report

    def _memory_evidence(self, processes: Sequence[ProcessFiles], code: int) -> tuple[str, ...]:
        """Return what says that the kernel killed a process for want of memory.

        Nothing for an orderly end.
        """
        if code == 0:
            return ()
        found = []
        before, now = self._oom_kills, num_oom_kills()
        if before is not None and now is not None and now > before:
            found.append(
                f"the control group counted {now - before} out-of-memory kill(s) in this run"
            )
        pids = (self._direct, *(one.flight.pid for one in processes))
        line = killed_by_kernel(pids)
        return (*found, f"kernel log: {line}") if line else tuple(found)

    def _standing_still(self, patience: Patience) -> tuple[ProcessFiles, str] | None:
        """Return the process that completed a step last, and how long ago, if that is too long."""
        assert self._folder is not None
        training = [one for one in collect(self._folder) if _is_training(one)]
        if not training or any(one.flight.resting for one in training):
            return None
        last = max(training, key=lambda one: one.flight.steps[-1][1])
        import statistics  # a run that does not hang has no use for it, nor for what comes with it

        times = [at for _, at in last.flight.steps]
        usual = statistics.median(b - a for a, b in itertools.pairwise(times))
        limit = max(patience.steps * usual, patience.seconds)
        still = time.monotonic() - times[-1]
        if still <= limit:
            return None
        return last, f"no step for {still:.3g} s, the median step took {usual:.3g} s"

    def _end(self, child: subprocess.Popen[Any], patience: Patience) -> int:
        """Take the stacks of every training process, then end the command; return its exit code."""
        assert self._folder is not None
        assert self._hung is not None
        pids = [one.flight.pid for one in collect(self._folder) if one.flight.ended is None]
        for pid in pids:
            _ask_for_stacks(pid, self._folder)
        before, message = self._hung
        same = (one for one in collect(self._folder) if one.flight.pid == before.flight.pid)
        self._hung = next(same, before), message
        for number in (signal.SIGTERM, _FOR_GOOD):
            for pid in dict.fromkeys((child.pid, *pids)):
                with suppress(OSError):
                    os.kill(pid, number)
            with suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=patience.grace)
        return child.wait()


@contextmanager
def supervised(
    store: Store, *, record: bool = False, patience: Patience | None = None
) -> Iterator[Supervisor]:
    """Yield the supervisor of one command; what its processes leave is deleted at the end.

    ``record``: note every operation, which costs time. ``patience``: None never calls a run hung.
    Without a folder for temporary files only the exit code tells how the command ended.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="nanstop-live-"))
    except OSError:
        folder = None
    try:
        yield Supervisor(store, folder, record=record, patience=patience)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _is_training(one: ProcessFiles) -> bool:
    return (
        one.flight.ended is None and len(one.flight.steps) >= MIN_STEPS and _alive(one.flight.pid)
    )


def _alive(pid: int) -> bool:
    if _FOR_GOOD == signal.SIGTERM:  # without POSIX signals, 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _ask_for_stacks(pid: int, folder: Path) -> None:
    """Have a process write the stack of every thread.

    By py-spy, where it is installed, if Python does not answer.
    """
    file = folder / f"{pid}.stacks"
    if process_files.STACKS_SIGNAL > 0:
        with suppress(OSError):
            os.kill(pid, process_files.STACKS_SIGNAL)
        if _within(2.0, lambda: file.exists() and file.stat().st_size > 0):
            time.sleep(0.2)  # the rest of what is being written
            return
    spy = shutil.which("py-spy")
    if spy is not None:
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [spy, "dump", "--pid", str(pid)],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=15,
                check=False,
            )
            file.write_text(done.stdout, encoding="utf-8")


def _within(seconds: float, happened: Callable[[], bool]) -> bool:
    limit = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True
