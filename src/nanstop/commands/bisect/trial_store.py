"""Trials of a bisect on disk, found again by what they are made of.

Settings, script, versions of the machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, cast, get_args

from nanstop.errors import NanstopError
from nanstop.process.children.isolate import End
from nanstop.process.crash.crash_report import fatal_op
from nanstop.process.crash.left_files import collect
from nanstop.records import SCHEMA, FailureKey, Phase, Report, codec
from nanstop.records.record import record
from nanstop.records.vocabulary import DEATHS
from nanstop.session.machine import environment
from nanstop.store.files import load_record, write_whole
from nanstop.store.incidents import load_report, load_summary
from nanstop.store.summary import IncidentRow, Summary

FailureType = Literal["nonfinite", "exception", "exit", "signal", "oom", "timeout"]

RESULT, INCIDENTS, LIVE = "trial.json", "incidents", "live"

_MAX_HASHED_BYTES = 64 * 2**20
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?(e[+-]?\d+)?")


@record
class Failure:
    """One way in which a run failed.

    ``name``: code of the finding, signal, class of the exception, or exit code.

    ``key``: where a value stopped being finite;
    of a death by signal, the operation that was running, where recorded.
    """

    kind: FailureType
    name: str
    message: str = ""
    key: FailureKey | None = None

    def same_as(self, other: Failure) -> bool:
        """Return whether both are the same failure.

        Numbers in the message of an exception do not count.
        """
        if self.kind != other.kind:
            return False
        if self.kind == "nonfinite" and self.key is not None and other.key is not None:
            return self.key.same_as(other.key)
        if self.kind == "exception":
            mine, theirs = (_NUMBERS.sub("#", one.message) for one in (self, other))
            return self.name == other.name and mine == theirs
        return self.kind in ("oom", "timeout") or self.name == other.name

    def __str__(self) -> str:
        if self.key is not None:
            where = f" at `{self.key.module}`" if self.key.module else ""
            what = f"{self.key.kind} " if self.kind == "nonfinite" else ""
            return f"{self.name}: {what}in `{self.key.op}`, {self.key.phase}{where}"
        return f"{self.name}: {self.message}" if self.message else self.name


@record
class Finished:
    """A finished trial.

    How its process ended, what failed in it (the deciding failure first), updates it applied.

    ``forked``: its process was forked from one that had imported its libraries.
    """

    schema: int = SCHEMA
    end: End
    failures: tuple[Failure, ...] = ()
    steps: int = 0
    memory_bytes: int | None = None
    forked: bool = False

    def holds(self, *, timeout: float | None, memory_bytes: int | None) -> bool:
        """Return whether the trial would end so under these limits too."""
        if self.end.kind == "timeout":
            return timeout is not None and self.end.seconds >= timeout
        return self.end.kind != "oom" or self.memory_bytes == memory_bytes


class TrialStore:
    """The folder of a bisect's trials.

    What cannot be written is remembered, and said in ``problem``.

    ``words``: the program and every value of the settings. Files among them are part of a trial's
    identity, and so are the Python files beside a script; folders are not.
    """

    def __init__(self, folder: Path, words: Sequence[str]) -> None:
        self.folder = folder
        self.problem = ""
        self._known: dict[str, Finished] = {}
        self._base = _identity(words)

    def digest(self, settings: Mapping[str, Any], attempt: int) -> str:
        """Return the name of a trial: equal for equal settings, script, versions and repetition."""
        text = json.dumps([settings, attempt], sort_keys=True, default=repr)
        return hashlib.sha256(f"{self._base}\n{text}".encode()).hexdigest()[:16]

    def place(self, digest: str) -> Path:
        """Return the folder of the trial whose configuration has this digest. Creates nothing."""
        return self.folder / digest

    def load(self, digest: str) -> Finished | None:
        """Return a finished trial, or None for one that is not there, was interrupted or is
        damaged.
        """
        if digest not in self._known:
            with suppress(NanstopError):
                self._known[digest] = load_record(self.place(digest) / RESULT, Finished)
        return self._known.get(digest)

    def begin(self, digest: str) -> Path:
        """Return the empty folder of a new trial.

        Errors: ``NanstopError`` NS001 where the disk refuses it.
        """
        place = self.place(digest)
        try:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        return place

    def keep(self, digest: str, finished: Finished) -> None:
        """Write a finished trial down.

        One whose process was stopped from outside never comes here.
        """
        self._known[digest] = finished
        try:
            write_whole(self.place(digest) / RESULT, codec.to_json(finished).encode())
        except OSError as error:
            self.problem = f"{cannot_write(self.folder, error).message}; this trial will run again"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder against another bisect. Errors: ``NanstopError`` NS001."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise cannot_write(self.folder, error) from error
        try:
            _lock(handle, self.folder)
            yield
        finally:
            os.close(handle)


def read_end(place: Path, end: End) -> Finished:
    """Return a trial whose process has ended as ``end``, with the incidents that its watch wrote.

    A process that was killed is the failure by itself; otherwise the first incident is, before the
    exception that may have followed from it.
    """
    summary = read_summary(place)
    incidents = tuple(_incident(place / INCIDENTS, row) for row in summary.incidents)
    death = _death(end, place / LIVE)
    if death is None:
        failures = incidents
    elif death.kind in DEATHS:
        failures = (death, *incidents)
    else:
        failures = (*incidents, death)
    return Finished(end=end, failures=failures, steps=summary.steps)


def read_summary(place: Path) -> Summary:
    """Return the summary of a trial, empty where nothing was watched yet."""
    with suppress(NanstopError):
        return load_summary(place / INCIDENTS / "summary.json")
    return Summary()


def failures_so_far(place: Path) -> tuple[Failure, ...]:
    """Return what has failed in a trial that is running."""
    return tuple(_incident(place / INCIDENTS, row) for row in read_summary(place).incidents)


def cannot_write(folder: Path, error: OSError) -> NanstopError:
    """Return the error for a folder that cannot be written, with what to do."""
    return NanstopError(
        f"cannot write {folder}: {error.strerror or error}",
        hint="NANSTOP_DIR names another folder for incidents and trials",
    )


def _incident(folder: Path, row: IncidentRow) -> Failure:
    key = None
    with suppress(NanstopError):
        key = _key(load_report(folder / row.folder))
    return Failure(kind="nonfinite", name=row.code, message=row.title, key=key)


def _key(report: Report) -> FailureKey | None:
    if report.localization is not None:
        return report.localization.key
    return report.replay.key if report.replay else None


def _death(end: End, live: Path) -> Failure | None:
    if end.kind not in get_args(FailureType):
        return None
    key = _running(live) if end.kind in ("signal", "timeout") else None
    return Failure(kind=cast("FailureType", end.kind), name=end.name, message=end.message, key=key)


def _running(live: Path) -> FailureKey | None:
    """Return the operation that a recorded process died in, or had completed last."""
    flights = (left.flight for left in collect(live) if left.trained)
    last = next((op for flight in flights if (op := fatal_op(flight))), None)
    if last is None:
        return None
    return FailureKey(
        kind="signal", phase=cast("Phase", last.phase), op=last.op, module=last.module
    )


def _identity(words: Sequence[str]) -> str:
    """Return a digest of the program, the files that ``words`` name, the Python files beside
    them, and the machine.
    """
    digest = hashlib.sha256("\0".join(words).encode())
    named = [Path(word) for word in words[1:] if "\0" not in word and _is_file(word)]
    beside = [one for file in named if file.suffix == ".py" for one in file.parent.glob("*.py")]
    for file in sorted({*named, *beside}):
        with suppress(OSError), file.open("rb") as stream:
            digest.update(stream.read(_MAX_HASHED_BYTES))
    # Not what is read from an imported torch: this process may or may not have imported it.
    machine = environment()
    versions = (machine.nanstop, machine.python, machine.torch, machine.driver, machine.packages)
    return f"{digest.hexdigest()} {sys.executable} {versions} {machine.env_vars}"


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except OSError:  # too long for a name
        return False


def _lock(handle: int, folder: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise NanstopError(f"another bisect is at work in {folder}") from error
    except OSError:  # a network file system that has no locks
        return
