"""What the processes of a watched command have left in its live folder."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nanstop.errors import NanstopError, TrainingStopped
from nanstop.numerics.host_memory import is_out_of_memory
from nanstop.process.crash.flight_file import Flight, read
from nanstop.process.crash.training_facts import TrainingFacts
from nanstop.store.files import load_record, read_text
from nanstop.wording import counted

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

    @property
    def place(self) -> str:
        """Where the innermost frame of the script is, as "file:line in function", or ""."""
        if self.flight.exchange is not None:
            return self.flight.exchange.at
        from nanstop.own_code import is_library  # an orderly end has no use for it

        own = (one for one in self.frames if not is_library(one[0]))
        return next((f"{file}:{line} in {name}" for file, line, name in own), "")

    @property
    def rank(self) -> int:
        """Which of the processes that train together it is."""
        return self.known.rank if self.known is not None else 0

    @property
    def updates(self) -> str:
        """How many it has made, in words."""
        return counted(self.flight.num_updates, "update")


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
