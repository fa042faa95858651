"""What is run in a child process, and who runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nanstop.process.children.isolate import End, EndKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A command with its folder and bounds.
    ``alone``: it has to be a process that was started by itself.
    """

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str]
    timeout: float | None = None
    memory_bytes: int | None = None
    alone: bool = False


class Running(Protocol):
    """A job that was started, as ``isolate.Child`` is."""

    folder: Path
    forked: bool

    def poll(self) -> End | None:
        """Return how the job ended, None while it runs."""
        ...

    def stop(self, kind: EndKind = "stopped") -> End:
        """End the job with all that it started, and return its end, which is called ``kind``."""
        ...


class Executor(Protocol):
    """Starts jobs. ``forks``: some of them may be forks;
    ``why_not`` says why none is, where any could be.
    """

    @property
    def forks(self) -> bool:
        """Whether jobs may be forked from a process that has the imports."""
        ...

    @property
    def why_not(self) -> str: ...

    def start(self, job: Job) -> Running:
        """Start a job and return it. Errors: ``NanstopError`` where its command cannot be run."""
        ...

    def stop_forking(self, why: str) -> None: ...

    def close(self) -> None: ...
