"""A command in a child process of its own group: bounded in time and memory, ended whole, its end classified."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from nanstop.errors import NanstopError
from nanstop.records import CONFIG

EndKind = Literal["clean", "exception", "exit", "signal", "oom", "timeout", "stopped"]

OUTPUT, ERRORS = "out.txt", "err.txt"

_TAIL_BYTES = 64 * 1024
_GRACE_SECONDS = 2.0
_OOM_EVENTS = Path("/sys/fs/cgroup/memory.events")
_EXCEPTION = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")
_TELLING = re.compile(r"abort|assert|error|fatal|terminate|what\(\)", re.IGNORECASE)
"""In the last line before a death by signal: it says why. Other lines only happen to be the last."""
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|Cannot allocate memory|std::bad_alloc", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a child ended.

    ``name``: the signal ("SIGFPE"), the class of the exception, or "exit code 3". ``message``: the exception's own
    line, or the last that was written to standard error. ``peak_bytes``: resident memory of the child itself.
    "stopped": ended because what was asked is answered. ``code`` is as a shell says it, 128 + n after signal n.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = CONFIG
    kind: EndKind
    name: str = ""
    message: str = ""
    code: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0


class Child:
    """A command that is running in ``folder``/out.txt and err.txt, in a process group of its own.

    ``memory_bytes`` bounds the private memory of each of its processes (``RLIMIT_DATA``; address space alone, which
    CUDA reserves far more of than it uses, is not counted). No core file is written. Errors: ``NanstopError`` NS001 where the
    command cannot be started or memory cannot be bounded.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        timeout: float | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self.folder = folder
        self._ooms = _num_oom_kills()
        self._began = time.monotonic()
        self._deadline = None if timeout is None else self._began + timeout
        try:
            with (folder / OUTPUT).open("wb") as out, (folder / ERRORS).open("wb") as err:
                self._process = subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                )
        except OSError as error:
            raise NanstopError(f"cannot start {command[0]}: {error.strerror or error}") from error
        self._bound(memory_bytes)

    def poll(self) -> End | None:
        """Return how the child ended, or None while it runs; one that is over its time is ended now."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return self.stop("timeout")
        return self._reaped(os.WNOHANG)

    def stop(self, kind: EndKind = "stopped") -> End:
        """End the child and everything that it started: politely, then for good."""
        self._signal(signal.SIGTERM)
        give_up = time.monotonic() + _GRACE_SECONDS
        while (end := self._reaped(os.WNOHANG)) is None and time.monotonic() < give_up:
            time.sleep(0.02)
        if end is None:
            self._signal(signal.SIGKILL)
            end = self._reaped(0)
        assert end is not None
        return replace(end, kind=kind, name=kind)

    def _reaped(self, options: int) -> End | None:
        pid, status, usage = os.wait4(self._process.pid, options)
        if pid == 0:
            return None
        # Workers of a process that died may hold a device or a port that the next trial needs.
        self._signal(signal.SIGKILL)
        self._process.returncode = code = os.waitstatus_to_exitcode(status)
        errors = _tail(self.folder / ERRORS)
        end = classify(code, errors, oom_killed=_num_oom_kills() > self._ooms)
        seconds = time.monotonic() - self._began
        return replace(end, seconds=seconds, peak_bytes=usage.ru_maxrss * 1024)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _bound(self, memory_bytes: int | None) -> None:
        import resource

        try:
            limits = {resource.RLIMIT_CORE: 0}
            if memory_bytes is not None:
                limits[resource.RLIMIT_DATA] = memory_bytes
            for name, limit in limits.items():
                with suppress(ProcessLookupError):
                    resource.prlimit(self._process.pid, name, (limit, limit))
        except AttributeError as error:
            if memory_bytes is not None:
                self.stop()
                raise NanstopError("the memory of a trial can be bounded on Linux only") from error


def classify(code: int, errors: str, *, oom_killed: bool = False) -> End:
    """Return the end that an exit code (negative: a signal) and the tail of standard error tell of.

    A SIGKILL is taken for the kernel's when its count of out-of-memory kills rose meanwhile.
    """
    shell_code = code if code >= 0 else 128 - code
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "")
    if code == 0:
        return End(kind="clean")
    if code < 0:
        name = _signal_name(-code)
        if -code == signal.SIGKILL and oom_killed:
            return End(kind="oom", name=name, message="killed by the kernel", code=shell_code)
        message = last if _TELLING.search(last) else ""
        return End(kind="signal", name=name, message=message, code=shell_code)
    name, message = _exception(errors)
    if name and ("OutOfMemory" in name or name == "MemoryError" or _OUT_OF_MEMORY.search(message)):
        return End(kind="oom", name=name, message=message, code=code)
    if name:
        return End(kind="exception", name=name, message=message, code=code)
    return End(kind="exit", name=f"exit code {code}", message=last, code=code)


def _exception(errors: str) -> tuple[str, str]:
    """Return class and first line of the exception that the last traceback in ``errors`` ends with, or empty strings."""
    _, traceback, after = errors.rpartition("Traceback (most recent call last):")
    if not traceback:
        return "", ""
    unindented = (line for line in after.splitlines() if line and not line[0].isspace())
    found = next((match for line in unindented if (match := _EXCEPTION.match(line))), None)
    return (found["name"].rpartition(".")[2], found["message"] or "") if found else ("", "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _tail(file: Path) -> str:
    with suppress(OSError), file.open("rb") as stream:
        stream.seek(max(file.stat().st_size - _TAIL_BYTES, 0))
        return stream.read().decode(errors="replace")
    return ""


def _num_oom_kills() -> int:
    """Return how often the kernel killed for memory in this control group; 0 where that cannot be read."""
    with suppress(OSError, ValueError):
        for line in _OOM_EVENTS.read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
