"""A process that has imported what a script will import, and forks a child for each run of it.

Importing torch, transformers and trl takes longer than many a short training. A child forked here
has them at once; all else is as if its command had been started by itself: environment, arguments,
standard streams, limits, ``__main__``.

    with ForkServer(imports_of(script), environment=os.environ) as parent:
        words = [sys.executable, "train.py", "--steps", "3"]
        child = parent.fork(BoundedCommand(command=words, folder=out, environment=os.environ))

``child.poll()`` returns how it ended, as that of a spawned one. What holds only for a process that
was started alone (a library that looks at the command line of its process, a thread that an import
begins) is a reason to spawn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from select import select
from typing import Any

from nanstop.process.children import fork_server_process
from nanstop.process.children.isolate import BoundedCommand, Child, LostError, require_bounds
from nanstop.process.children.script_imports import Imports

_SERVER = f"from {fork_server_process.__name__} import main; main()"

_IMPORT_SECONDS = 300.0
_ANSWER_SECONDS = 30.0
_END_SECONDS = 2.0


class CannotForkError(Exception):
    """A command has to be spawned; the message says why."""


class ForkServer:
    """Begins to import at once, in a process of its own that ends with this one, and all of its
    children with it.

    ``environment``: that in which the imports happen. ``late``: names of variables that nothing
    reads while it is imported, so that a child may have other values.
    """

    def __init__(
        self, imports: Imports, *, environment: Mapping[str, str], late: Collection[str] = ()
    ) -> None:
        self._environment = dict(environment)
        self._late = frozenset(late)
        self._ends: dict[int, tuple[int, int]] = {}
        self._unread = b""
        self._ready = False
        self._gone = ""
        (theirs, self._requests), (self._replies, ours) = os.pipe(), os.pipe()
        plan = json.dumps([imports.modules, imports.defaults, imports.variables, imports.folder])
        try:
            self._server = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs), str(ours), plan],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs, ours),
            )
        finally:
            os.close(theirs)
            os.close(ours)

    def fork(self, bounded: BoundedCommand) -> Child:
        """Return ``[python, SCRIPT, ...]`` as a running child, as ``isolate.spawn`` does.

        Waits for the imports. Errors: ``CannotForkError`` where it would not be the same as a
        command that was started by itself.
        """
        require_bounds(bounded.memory_bytes)
        command = list(bounded.command)
        if len(command) < 2 or command[0] != sys.executable or not command[1].endswith(".py"):
            raise CannotForkError("only a Python script can be forked")
        differing = bounded.environment.items() ^ self._environment.items()
        other = {name for name, _ in differing} - self._late
        if other:
            raise CannotForkError(
                f"{', '.join(sorted(other))} may be read while modules are imported"
            )
        self._wait_for_imports()
        began = {
            "command": command,
            "folder": str(bounded.folder.absolute()),
            "environment": dict(bounded.environment),
            "memory_bytes": bounded.memory_bytes,
        }
        self._send(began)
        answer = self._answer(_ANSWER_SECONDS)
        if "refused" in answer:
            raise CannotForkError(answer["refused"])
        return Child(_Forked(self, answer["pid"]), bounded, forked=True)

    def close(self) -> None:
        """End the process, and every child that still runs."""
        if self._server.returncode is not None:
            return
        for end in (self._requests, self._replies):
            os.close(end)
        try:
            self._server.wait(_END_SECONDS if self._ready else 0.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _wait_for_imports(self) -> None:
        if not self._ready:
            answer = self._answer(_IMPORT_SECONDS)
            self._gone = answer.get("refused", "")
            self._ready = True
        if self._gone:
            raise CannotForkError(self._gone)

    def _send(self, request: Mapping[str, Any]) -> None:
        try:
            data = json.dumps(request).encode() + b"\n"
            while data:
                data = data[os.write(self._requests, data) :]
        except OSError as error:
            raise CannotForkError(self._lost()) from error

    def _answer(self, seconds: float) -> dict[str, Any]:
        """Return the answer to what was asked last.

        Ends of children that come before it are noted.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for message in self._messages(deadline - time.monotonic()):
                if "end" not in message:
                    return message
                self._note(message)
            if self._gone:
                raise CannotForkError(self._gone)
        raise CannotForkError(f"the process to fork from did not answer for {seconds:.0f} s")

    def _messages(self, seconds: float) -> list[dict[str, Any]]:
        """Return what the server has said, once it has said something or ``seconds`` are over."""
        if self._server.returncode is not None or self._gone:
            return []
        if b"\n" not in self._unread and select([self._replies], [], [], max(seconds, 0.0))[0]:
            data = os.read(self._replies, 65536)
            self._gone = "" if data else self._lost()
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        return [json.loads(line) for line in lines]

    def _lost(self) -> str:
        self._gone = "the process to fork from is gone"
        return self._gone

    def _note(self, message: Mapping[str, Any]) -> None:
        pid, code, peak_bytes = message["end"]
        self._ends[pid] = code, peak_bytes

    def _end_of(self, pid: int, seconds: float) -> tuple[int, int] | None:
        for message in self._messages(0.0 if pid in self._ends else seconds):
            self._note(message)
        if pid not in self._ends and (self._gone or self._server.returncode is not None):
            raise LostError(self._gone)
        return self._ends.pop(pid, None)


class _Forked:
    """A process that the fork server has forked and waits for."""

    def __init__(self, parent: ForkServer, pid: int) -> None:
        self._parent = parent
        self._pid = pid

    @property
    def pid(self) -> int:
        return self._pid

    def reaped(self, *, wait: bool) -> tuple[int, int] | None:
        ended = self._parent._end_of(self._pid, 0.0)
        while wait and ended is None:
            ended = self._parent._end_of(self._pid, 1.0)
        return ended
