"""The parent of a training: waits for it, notices that it stands still, and says how it ended.

A death that leaves no Python exception (a signal, the out-of-memory killer, a hang) becomes an
incident like any other, told from the flight file, Python's own report of a fatal signal and the
counters of the kernel.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from nanstop.process.crash import process_files
from nanstop.process.crash.left_files import ProcessFiles, collect
from nanstop.process.crash.process_end import ProcessEnd, classify
from nanstop.process.crash.standing_still import (
    INTERRUPTED,
    Patience,
    Still,
    standing_still,
    with_stacks,
)
from nanstop.process.oom import killed_by_kernel, num_oom_kills
from nanstop.records import Report
from nanstop.store.files import write_whole
from nanstop.store.incidents import Store

ARMED = "record-next-run"
"""A file of this name in the incident folder:
a run died without a word, and the next one is recorded.
"""
STACKS = "stacks.txt"

_UNTOLD = ("signal", "oom_killed", "hang")
"""Ends that no exception tells of."""
_FOR_GOOD = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Ends a process that does not end when it is asked to; on Windows every signal does."""


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
        self._hung: Still | None = None
        self._stuck: Still | None = None
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
            still = standing_still(self._folder, self._patience)
            if still is not None:
                self._hung = with_stacks(self._folder, still, seconds=2.0)
                return self._end(child, self._patience)

    def interrupting(self) -> None:
        """Note where a training is that has stood still and that somebody ends now."""
        if self._folder is None or self._stuck is not None or self._hung is not None:
            return
        still = standing_still(self._folder, INTERRUPTED)
        if still is not None:
            # A launcher ends its processes at once.
            self._stuck = with_stacks(self._folder, still, seconds=0.2)

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
            still=self._hung or self._stuck,
            interrupted=(interrupted or self._stuck is not None) and self._hung is None,
            killed_for_memory=bool(evidence),
            failed=failed,
            stopped=stopped,
        )
        if end.kind == "clean":
            with suppress(OSError):
                (self._store.folder / ARMED).unlink()
        if end.kind not in (*_UNTOLD, "out_of_memory") and end.files is None:
            return end, None
        report = self._write(end, evidence)
        if not self.recording and end.kind in _UNTOLD:
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

    def _end(self, child: subprocess.Popen[Any], patience: Patience) -> int:
        """End the command and what it has started; return its exit code."""
        assert self._folder is not None
        processes = collect(self._folder, with_facts=False)
        pids = [one.flight.pid for one in processes if one.flight.ended is None]
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
