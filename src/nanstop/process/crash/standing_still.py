"""Training processes that complete no step any more, and where each of them is."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nanstop.process.crash import process_files
from nanstop.process.crash.left_files import ProcessFiles, collect

MIN_STEPS = 4
"""Completed steps before anything is known of how long one takes."""
_FOR_PY_SPY = 7.5
"""It may take so many times as long as Python itself."""
MOST_RANKS = 8
"""Of as many it is said where they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """A run hangs when no step was completed for ``steps`` times the median step time, ``seconds``
    at least.

    ``poll``: seconds between two looks.
    ``grace``: seconds from asking a process to end to ending it.
    """

    steps: float
    seconds: float = 60.0
    poll: float = 1.0
    grace: float = 10.0


INTERRUPTED = Patience(steps=20.0, seconds=20.0)
"""A run that somebody ends after so long has stood still, and the person wonders where."""


@dataclass(frozen=True, slots=True)
class Still:
    """``files``: of the process that completed a step last. ``message``: how long ago, in words.
    ``places``: where each of several ranks is.
    """

    files: ProcessFiles
    message: str
    places: tuple[str, ...] = ()


def standing_still(folder: Path, patience: Patience) -> Still | None:
    """Return what is known of a training whose latest step is too long ago."""
    training = [one for one in collect(folder, with_facts=False) if _is_training(one)]
    if not training or any(one.flight.resting for one in training):
        return None
    last = max(training, key=lambda one: one.flight.steps[-1][1])
    import statistics  # a run that does not hang has no use for it, nor for what comes with it

    times = [at for _, at in last.flight.steps]
    usual = statistics.median(b - a for a, b in itertools.pairwise(times))
    still = time.monotonic() - times[-1]
    if still <= max(patience.steps * usual, patience.seconds):
        return None
    return Still(last, f"no step for {still:.3g} s, the median step took {usual:.3g} s")


def with_stacks(folder: Path, still: Still, *, seconds: float) -> Still:
    """Have every process write the stack of each of its threads; each gets up to ``seconds``."""
    living = [one for one in collect(folder, with_facts=False) if one.flight.ended is None]
    pids = [one.flight.pid for one in living]
    _ask_for_stacks(pids)
    for pid in pids:
        _wait_for_stack(pid, folder / f"{pid}.stacks", seconds)
    found = collect(folder)
    same = (one for one in found if one.flight.pid == still.files.flight.pid)
    return Still(next(same, still.files), still.message, tuple(_places(found)))


def _places(found: tuple[ProcessFiles, ...]) -> Iterator[str]:
    ranks = sorted((one for one in found if one.known is not None), key=lambda one: one.rank)
    for one in ranks[:MOST_RANKS] if len(ranks) > 1 else ():
        if one.place:
            yield f"rank {one.rank} has made {one.updates} and is at {one.place}"


def _is_training(one: ProcessFiles) -> bool:
    flight = one.flight
    return flight.ended is None and len(flight.steps) >= MIN_STEPS and _alive(flight.pid)


def _alive(pid: int) -> bool:
    if not hasattr(signal, "SIGKILL"):  # without POSIX signals, 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _ask_for_stacks(pids: list[int]) -> None:
    """Have processes write the stack of every thread."""
    for pid in pids if process_files.STACKS_SIGNAL > 0 else ():
        with suppress(OSError):
            os.kill(pid, process_files.STACKS_SIGNAL)


def _wait_for_stack(pid: int, file: Path, seconds: float) -> None:
    """Wait for what a process was asked for.

    By py-spy, where it is installed, if Python does not answer.
    """
    if _within(seconds, lambda: file.exists() and file.stat().st_size > 0):
        time.sleep(seconds / 10)  # the rest of what is being written
        return
    spy = shutil.which("py-spy")
    if spy is not None:
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(
                [spy, "dump", "--pid", str(pid)],
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=_FOR_PY_SPY * seconds,
                check=False,
            )
            file.write_text(done.stdout, encoding="utf-8")


def _within(seconds: float, happened: Callable[[], bool]) -> bool:
    limit = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True
