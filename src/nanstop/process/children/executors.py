"""Where the trials of a bisect run.

Forked from a fork server, spawned, or as tasks of a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from nanstop.errors import unknown
from nanstop.process.children.fork_server import CannotForkError, ForkServer
from nanstop.process.children.isolate import BoundedCommand, Child, End, ExitKind, spawn
from nanstop.process.children.script_imports import Imports, imports_of

_LATE = ("NANSTOP_DIR", "NANSTOP_RUN")
"""Variables that differ from trial to trial; they are read when a training begins."""


class Running(Protocol):
    """A command that was started, as ``isolate.Child`` is."""

    folder: Path
    forked: bool

    def poll(self) -> End | None:
        """Return how the command ended, None while it runs."""
        ...

    def stop(self, kind: ExitKind = "stopped") -> End:
        """End the command with all that it started. Return its end, called ``kind``."""
        ...


class Executor(Protocol):
    """Starts commands.

    ``forks``: some of them may be forks; ``why_not`` says why none is, where any could be.
    """

    @property
    def forks(self) -> bool:
        """Whether commands may be forked from a process that has the imports."""
        ...

    @property
    def why_not(self) -> str: ...

    def start(self, bounded: BoundedCommand) -> Running:
        """Start a command and return it. Errors: ``NanstopError`` where it cannot be run."""
        ...

    def stop_forking(self, why: str) -> None: ...

    def close(self) -> None: ...


class Local:
    """Starts commands on this machine.

    The first ones by themselves, others as forks as far as their script allows it.
    """

    def __init__(self, *, forks: bool) -> None:
        self.why_not = "" if forks else "each trial is to be started by itself"
        self._parent: ForkServer | None = None

    @property
    def forks(self) -> bool:
        return not self.why_not

    def start(self, bounded: BoundedCommand) -> Child:
        """Return the running child. Errors: ``NanstopError`` NS001 as ``spawn``."""
        parent = self._fork_server(bounded)
        if parent is not None and not bounded.alone:
            try:
                return parent.fork(bounded)
            except CannotForkError as error:
                self.stop_forking(str(error))
        return spawn(bounded)

    def stop_forking(self, why: str) -> None:
        """Start every further command by itself."""
        self.why_not = why
        self.close()

    def close(self) -> None:
        """End the fork server, if there is one."""
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    def _fork_server(self, bounded: BoundedCommand) -> ForkServer | None:
        """Return the parent to fork from.

        It begins to import while commands that have to be alone are running.
        """
        if self._parent is None and self.forks:
            imports = _imports(bounded.command)
            self.why_not = imports.problem
            if not imports.problem:
                self._parent = ForkServer(imports, environment=bounded.environment, late=_LATE)
        return self._parent


def _imports(command: Sequence[str]) -> Imports:
    script = next(iter(command[1:]), "")
    if not script.endswith(".py"):
        return Imports(problem="only a Python script can be forked")
    return imports_of(Path(script))


def _ray() -> Executor:
    from nanstop.process.children.ray import RayTasks

    return RayTasks()


_EXECUTORS: Mapping[str, Callable[[], Executor]] = {
    "fork": partial(Local, forks=True),
    "spawn": partial(Local, forks=False),
    "ray": _ray,
}


def executor(name: str) -> Executor:
    """Return the executor of this name: "fork", "spawn" or "ray".

    Errors: ``NanstopError`` NS001 for a name that is none, or where ray is not installed.
    """
    if name not in _EXECUTORS:
        raise unknown("executor", name, _EXECUTORS)
    return _EXECUTORS[name]()
