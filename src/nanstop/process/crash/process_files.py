"""What a watched process leaves for the one above it while it lives, at no cost a step.

Its flight file and more.

In the folder that ``nanstop run`` names in ``NANSTOP_LIVE``: ``PID.flight`` (see
``flight_file``), ``PID.stacks`` (Python's own report of a fatal signal, or the stacks that were
asked for) and ``PID.facts.json`` (of the training that was begun). Until a training is begun
nothing heavy is imported: many a process imports torch and trains nothing.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanstop.process.crash.flight_file import NUM_OPS, FlightFile
from nanstop.ranks import rank

if TYPE_CHECKING:
    from nanstop.session.session import Session

FOLDER = "NANSTOP_LIVE"
RECORD = "NANSTOP_RECORD"
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 5
"""Asks a process for its stacks. A real-time signal:
SIGUSR1 and 2 belong to schedulers and users.
"""

MAX_MESSAGE = 800


class OwnFiles:
    """The files of this process. ``recorder``: the switched-on flight recorder, or None."""

    def __init__(self, folder: Path, *, num_ops: int) -> None:
        stem = folder / str(os.getpid())
        self.file = FlightFile(stem.with_suffix(".flight"), num_ops=num_ops)
        self.recorder: Any = None
        self._facts_path = stem.with_suffix(".facts.json")
        self._stacks = stem.with_suffix(".stacks").open("w", encoding="utf-8")
        if not faulthandler.is_enabled():  # the user's own, or PYTHONFAULTHANDLER, comes first
            faulthandler.enable(self._stacks, all_threads=True)
        if STACKS_SIGNAL > 0 and signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL:
            faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        atexit.register(self._ended)

    def opened(self, session: Session) -> None:
        """Note what is being trained, and from now on every step of it. One file is written."""
        session.beat = self._beat
        from nanstop.process.crash.training_facts import TrainingFacts
        from nanstop.records.codec import to_json

        known = TrainingFacts(facts=session.facts, environment=session.environment, rank=rank())
        fresh = self._facts_path.with_suffix(".new")
        fresh.write_text(to_json(known), encoding="utf-8")
        fresh.replace(self._facts_path)

    def _beat(self, step: int | None) -> None:
        if step is None:
            self.file.rest()
        else:
            self.file.step(step)

    def _ended(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is None:
            self.file.ended()
        else:
            from nanstop.process.crash.exchange import exchange_of

            message = str(error)[:MAX_MESSAGE]
            self.file.ended(type(error).__name__, message, exchange_of(error))


def begin(given: Mapping[str, str] | None = None) -> OwnFiles | None:
    """Return this process's live files, made where ``nanstop run`` asks for them, with the recorder
    on if it does.

    Errors: ``OSError`` where the folder cannot be written.
    """
    variables = os.environ if given is None else given
    folder = variables.get(FOLDER)
    if not folder:
        return None
    recording = variables.get(RECORD) == "1"
    live = OwnFiles(Path(folder), num_ops=NUM_OPS if recording else 0)
    if recording:
        from nanstop.tracing.flight_recorder import FlightRecorder

        live.recorder = FlightRecorder(live.file.op, live.file.done)
        live.recorder.__enter__()
    return live
