"""How a watched command ended, told from its exit code and from what its processes left."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nanstop.errors import NanstopError, TrainingStopped
from nanstop.numerics.host_memory import is_out_of_memory
from nanstop.process.crash.flight_file import Flight, read
from nanstop.process.crash.training_facts import TrainingFacts
from nanstop.process.signals import ASKED, FATAL, signal_name
from nanstop.store.files import load_record, read_text

EndKind = Literal[
    "clean",
    "stopped",
    "exception",
    "nonfinite",
    "signal",
    "oom_killed",
    "out_of_memory",
    "hang",
    "interrupted",
]

MAX_STACKS_BYTES = 2**20
_SAID = {
    "floating": "SIGFPE",
    "segmentation": "SIGSEGV",
    "aborted": "SIGABRT",
    "bus": "SIGBUS",
    "illegal": "SIGILL",
}
_HEADLINE = re.compile(r"^Fatal Python error: (\w+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFiles:
    """What one process left.

    ``stacks``: the report of a fatal signal, or the stacks it was asked for.
    """

    flight: Flight
    known: TrainingFacts | None = None
    stacks: str = ""

    @property
    def signal(self) -> str:
        """The fatal signal that Python itself reported, or ""."""
        said = _HEADLINE.search(self.stacks)
        return _SAID.get(said.group(1).lower(), "") if said else ""

    @property
    def trained(self) -> bool:
        """Whether it was more than a launcher.

        It trained, or its operations were recorded inside a model.
        """
        return self.known is not None or bool(self.flight.steps)

    @property
    def stopped(self) -> bool:
        """Whether it ended because nanstop stopped its training."""
        return self.flight.ended is not None and self.flight.ended[0] == TrainingStopped.__name__

    @property
    def out_of_memory(self) -> bool:
        """Whether an exception ended it that says that memory was short."""
        kind, message = self.flight.ended or ("", "")
        return is_out_of_memory(kind, message)

    @property
    def frames(self) -> tuple[tuple[str, int, str], ...]:
        """(file, line, function) of the thread that failed, innermost first.

        Of the main thread if it was asked.
        """
        threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", self.stacks, flags=re.MULTILINE)[
            1:
        ]
        if not threads:
            return ()
        own = next((one for one in threads if one.startswith("Current")), threads[-1])
        found = (_FRAME.match(line) for line in own.splitlines())
        return tuple((one[1], int(one[2]), one[3]) for one in found if one)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """``signal``: name of the signal or of the exception, or "".

    ``message``: of what it was seen by. ``files``: those of the process to blame.
    """

    kind: EndKind
    signal: str = ""
    message: str = ""
    files: ProcessFiles | None = None


def collect(folder: Path, *, with_facts: bool = True) -> tuple[ProcessFiles, ...]:
    """Return what the processes of a run left in its live folder.

    What cannot be read is left out. ``with_facts``: what trained is asked for as well, which an
    orderly end has no use for.
    """
    found = []
    for path in sorted(folder.glob("*.flight")):
        known, stacks = None, ""
        try:
            flight = read(path)
        except NanstopError:
            continue
        with suppress(NanstopError):
            stacks = read_text(path.with_suffix(".stacks"), MAX_STACKS_BYTES)
        if with_facts:
            with suppress(NanstopError):
                known = load_record(path.with_suffix(".facts.json"), TrainingFacts)
        found.append(ProcessFiles(flight=flight, known=known, stacks=stacks))
    return tuple(found)


def classify(
    code: int,
    processes: Sequence[ProcessFiles],
    *,
    direct: int = 0,
    hung: tuple[ProcessFiles, str] | None = None,
    interrupted: bool = False,
    killed_for_memory: bool = False,
    failed: bool = False,
    stopped: bool = False,
) -> ProcessEnd:
    """Return how a command ended. ``code``: as ``Popen`` says it, negative for a signal.

    ``direct``: pid of the command itself. ``hung``: the process that stood still, and for how long,
    in words. ``interrupted``: it was asked to end through us. ``failed``: incidents were recorded
    while it ran. ``stopped``: a training was stopped without an exception. A command that itself
    only reports the death of a child (torchrun, a shell) is judged by what the child left.
    """
    if hung is not None:
        return ProcessEnd(kind="hang", files=hung[0], message=hung[1])
    name = signal_name(code)
    if (
        code == 0
    ):  # also where nothing could catch the stop: a thread of its own, or the script's end
        stopped = stopped or any(one.stopped for one in processes)
        return ProcessEnd(kind="stopped" if stopped else "clean")
    if interrupted or name in ASKED:
        return ProcessEnd(kind="interrupted", signal=name)
    dead = next((one for one in processes if one.signal), None)
    if dead is not None:
        return ProcessEnd(kind="signal", signal=dead.signal, files=dead)
    if name in FATAL:
        return ProcessEnd(kind="signal", signal=name, files=_vanished(processes))
    if name == "SIGKILL" or _vanished_silently(processes, direct):
        kind = "oom_killed" if killed_for_memory else "signal"
        return ProcessEnd(kind=kind, signal="SIGKILL", files=_vanished(processes))
    short = next((one for one in processes if one.out_of_memory), None)
    if short is not None:
        kind, message = short.flight.ended or ("", "")
        return ProcessEnd(kind="out_of_memory", signal=kind, message=message, files=short)
    own: EndKind = "nonfinite" if failed else "exception"
    return ProcessEnd(kind="stopped" if any(one.stopped for one in processes) else own)


def _vanished(processes: Sequence[ProcessFiles]) -> ProcessFiles | None:
    """Return the process that never came to an end of its own.

    Of those that trained, the one silent for longest.
    """
    gone = [one for one in processes if one.flight.ended is None]
    gone = [one for one in gone if one.trained] or gone
    return min(
        gone, key=lambda one: one.flight.steps[-1][1] if one.flight.steps else 0.0, default=None
    )


def _vanished_silently(processes: Sequence[ProcessFiles], direct: int) -> bool:
    """Return whether a training process was killed, and no other raised an exception that explains
    the end.

    The command itself is none of them: it returned an exit code (``os._exit``).
    """
    trained = [one.flight.ended for one in processes if one.trained and one.flight.pid != direct]
    return None in trained and not any(ended is not None and ended[0] for ended in trained)
