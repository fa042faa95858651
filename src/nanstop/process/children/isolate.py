"""A command in a child process of its own group.

Bounded in time and memory, ended whole, its end classified.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from nanstop.errors import NanstopError
from nanstop.numerics.host_memory import is_out_of_memory
from nanstop.process.children import run_bounded
from nanstop.process.oom import num_oom_kills
from nanstop.process.signals import signal_name
from nanstop.records.record import record

ExitKind = Literal["clean", "exception", "exit", "signal", "oom", "timeout", "stopped", "lost"]

OUTPUT, ERRORS = "out.txt", "err.txt"

_TAIL_BYTES = 64 * 1024
_GRACE_SECONDS = 2.0
_RSS_BYTES = 1 if sys.platform == "darwin" else 1024
"""The unit of ``ru_maxrss``:
https://developer.apple.com/library/archive/documentation/System/Conceptual/ManPages_iPhoneOS/man2/getrusage.2.html
"""
_EXCEPTION = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_TELLING = re.compile(r"abort|assert|error|fatal|terminate|what\(\)", re.IGNORECASE)
"""In the last line before a death by signal: it says why.
Other lines only happen to be the last.
"""


@record
class End:
    """How a child ended.

    ``name``: the signal ("SIGFPE"), the class of the exception, or "exit code 3". ``message``: the
    exception's own line, or the last that was written to standard error. ``peak_bytes``: resident
    memory of the child itself. "stopped": ended because what was asked is answered; "lost": nobody
    can tell. ``code`` is as a shell says it, 128 + n after signal n.
    """

    kind: ExitKind
    name: str = ""
    message: str = ""
    code: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0


class Process(Protocol):
    """A process that leads a group of its own, as whoever started it sees it."""

    @property
    def pid(self) -> int: ...

    def reaped(self, *, wait: bool) -> tuple[int, int] | None:
        """Return its exit code and peak memory in bytes once it has ended, else None.

        A negative exit code is a signal. What is left of its group is ended then. Errors:
        ``LostError`` where nobody can tell any more how it ended.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedCommand:
    """A command with its folder and bounds, those on memory for each of its processes.

    ``alone``: it has to be a process that was started by itself.
    """

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    timeout: float | None = None
    memory_bytes: int | None = None
    alone: bool = False


class LostError(Exception):
    """Whoever started a process is gone, and with it the word on how the process ended."""


class Child:
    """A running process that writes ``folder``/out.txt and err.txt, bounded in time, ended with
    all that it started.
    """

    def __init__(self, process: Process, bounded: BoundedCommand, *, forked: bool = False) -> None:
        self.folder = bounded.folder
        self.forked = forked
        self._process = process
        self._ooms = num_oom_kills() or 0
        self._began = time.monotonic()
        self._deadline = None if bounded.timeout is None else self._began + bounded.timeout

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> End | None:
        """Return how the child ended, or None while it runs.

        One that is over its time is ended now.
        """
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return self.stop("timeout")
        return self._end(wait=False)

    def stop(self, kind: ExitKind = "stopped") -> End:
        """End the child and everything that it started: politely, then for good."""
        self._signal(signal.SIGTERM)
        give_up = time.monotonic() + _GRACE_SECONDS
        while (end := self._end(wait=False)) is None and time.monotonic() < give_up:
            time.sleep(0.02)
        if end is None:
            self._signal(signal.SIGKILL)
            end = self._end(wait=True)
        assert end is not None
        return replace(end, kind=kind, name=kind)

    def _end(self, *, wait: bool) -> End | None:
        seconds = time.monotonic() - self._began
        try:
            reaped = self._process.reaped(wait=wait)
        except LostError:
            self._signal(signal.SIGKILL)
            return End(kind="lost", name="lost", code=128 + signal.SIGKILL, seconds=seconds)
        if reaped is None:
            return None
        code, peak_bytes = reaped
        killed = (num_oom_kills() or 0) > self._ooms
        end = end_of(code, _tail(self.folder / ERRORS), oom_killed=killed)
        return replace(end, seconds=seconds, peak_bytes=peak_bytes)

    def _signal(self, number: signal.Signals) -> None:
        signal_group(self.pid, number)


def spawn(bounded: BoundedCommand) -> Child:
    """Return a command as a running child, which is killed with all that it started should this
    process die.

    Errors: ``NanstopError`` NS001 where the command cannot be started or memory cannot be bounded.
    """
    require_bounds(bounded.memory_bytes)
    program = bounded.command[0]
    if shutil.which(program, path=bounded.environment.get("PATH")) is None:
        raise NanstopError(f"cannot start {program}: {os.strerror(errno.ENOENT)}")
    return Child(_Spawned(bounded), bounded)


def require_bounds(memory_bytes: int | None) -> None:
    """Raise ``NanstopError`` NS001 where a command cannot be ended whole.

    So too where memory is to be bounded and cannot be.
    """
    if not hasattr(os, "fork"):
        raise NanstopError(
            "a trial cannot be ended with all that it started: this system has no process groups",
            hint="bisect needs Linux, macOS or, on Windows, WSL",
        )
    if memory_bytes is not None and not sys.platform.startswith("linux"):
        raise NanstopError("the memory of a trial can be bounded on Linux only")


class _Spawned:
    """A command that was started by way of ``run_bounded``."""

    def __init__(self, bounded: BoundedCommand) -> None:
        prefix = [sys.executable, "-I", "-S", run_bounded.__file__]
        output, errors = bounded.folder / OUTPUT, bounded.folder / ERRORS
        reading, self._alive = os.pipe()
        try:
            with output.open("wb") as out, errors.open("wb") as err:
                self._process = subprocess.Popen(
                    [*prefix, str(reading), str(bounded.memory_bytes or 0), *bounded.command],
                    env=dict(bounded.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    pass_fds=(reading,),
                )
        except OSError as error:
            os.close(self._alive)
            why = error.strerror or error
            raise NanstopError(f"cannot start {bounded.command[0]}: {why}") from error
        finally:
            os.close(reading)

    @property
    def pid(self) -> int:
        return self._process.pid

    def reaped(self, *, wait: bool) -> tuple[int, int] | None:
        ended = reap(self.pid, wait=wait)
        if ended is not None:
            self._process.returncode = ended[0]
            with suppress(OSError):
                os.write(self._alive, run_bounded.DONE)
            os.close(self._alive)
        return ended


def reap(pid: int, *, wait: bool) -> tuple[int, int] | None:
    """Return exit code (negative: a signal) and peak resident bytes of a child once it has ended,
    else None.

    What is left of its group is killed then:
    workers of a process that died may hold a device or a port that the next trial needs.
    """
    found, status, usage = os.wait4(pid, 0 if wait else os.WNOHANG)
    if not found:
        return None
    signal_group(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss * _RSS_BYTES


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to every process of a group that there is."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def end_of(code: int, errors: str, *, oom_killed: bool = False) -> End:
    """Return the end that an exit code (negative: a signal) and the tail of standard error tell of.

    A SIGKILL is taken for the kernel's when its count of out-of-memory kills rose meanwhile.
    """
    shell_code = code if code >= 0 else 128 - code
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    if code == 0:
        return End(kind="clean")
    if code < 0:
        name = signal_name(code)
        if -code == signal.SIGKILL and oom_killed:
            return End(kind="oom", name=name, message="killed by the kernel", code=shell_code)
        message = last if _TELLING.search(last) else ""
        return End(kind="signal", name=name, message=message, code=shell_code)
    name, message = _exception(errors)
    if is_out_of_memory(name, message):
        return End(kind="oom", name=name, message=message, code=code)
    if name:
        return End(kind="exception", name=name, message=message, code=code)
    return End(kind="exit", name=f"exit code {code}", message=last, code=code)


def _exception(errors: str) -> tuple[str, str]:
    """Return class and first line of the exception that the last traceback in ``errors`` ends
    with, or empty strings.
    """
    _, traceback, after = errors.rpartition("Traceback (most recent call last):")
    if not traceback:
        return "", ""
    unindented = (line for line in after.splitlines() if line and not line[0].isspace())
    found = next((match for line in unindented if (match := _EXCEPTION.match(line))), None)
    return (found["name"].rpartition(".")[2], found["message"] or "") if found else ("", "")


def _tail(file: Path) -> str:
    with suppress(OSError), file.open("rb") as stream:
        stream.seek(max(file.stat().st_size - _TAIL_BYTES, 0))
        return stream.read().decode(errors="replace")
    return ""
