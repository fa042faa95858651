"""How a watched command ended, told from its exit code and from what its processes left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from nanstop.process.crash.left_files import ProcessFiles
from nanstop.process.crash.standing_still import Still
from nanstop.process.signals import ASKED, FATAL, signal_name
from nanstop.records.vocabulary import RANK_ELSEWHERE, RANK_ENDED

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """``signal``: name of the signal or of the exception, or "".

    ``message``: of what it was seen by. ``files``: those of the process to blame, where its own
    exception does not tell of the end. ``places``: where each of several ranks was.
    """

    kind: EndKind
    signal: str = ""
    message: str = ""
    files: ProcessFiles | None = None
    places: tuple[str, ...] = ()


def classify(
    code: int,
    processes: Sequence[ProcessFiles],
    *,
    direct: int = 0,
    still: Still | None = None,
    interrupted: bool = False,
    killed_for_memory: bool = False,
    failed: bool = False,
    stopped: bool = False,
) -> ProcessEnd:
    """Return how a command ended. ``code``: as ``Popen`` says it, negative for a signal.

    ``direct``: pid of the command itself. ``still``: it stood still until it was ended, by a person
    through us if it was ``interrupted``. ``failed``: incidents were recorded while it ran.
    ``stopped``: a training was stopped without an exception. A command that itself only reports the
    death of a child (torchrun, a shell) is judged by what the child left.
    """
    if still is not None and (code != 0 or not interrupted):
        kind = "interrupted" if interrupted else "hang"
        return ProcessEnd(kind=kind, message=still.message, files=still.files, places=still.places)
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
    kind = "nonfinite" if failed else "exception"
    if any(one.stopped for one in processes):
        kind = "stopped"
    return _left_waiting(processes, kind) or ProcessEnd(kind=kind)


def _left_waiting(processes: Sequence[ProcessFiles], kind: EndKind) -> ProcessEnd | None:
    """Return the end of a process that was in a step when another, of the same training, had no
    more batches, if there is one.

    The other has come to its end, or waits in a collective of the script's own.
    """
    known = [one for one in processes if one.known is not None and one.known.facts.ranks_agree]
    waiting = next((one for one in known if _is_within(one, "forward", "backward")), None)
    if waiting is None:
        return None
    found = partial(ProcessEnd, kind=kind, files=waiting)
    here = f"rank {waiting.rank} has made {waiting.updates} and goes on"
    for other in known:
        if other.flight.num_updates > waiting.flight.num_updates:
            continue
        rank, updates, elsewhere = other.rank, other.updates, other.flight.exchange
        if other.flight.ended == ("", ""):
            ended = f"rank {rank} has made {updates} and has ended"
            return found(signal=RANK_ENDED, message=f"{ended}; {here}")
        if elsewhere is not None and elsewhere.within == "collective":
            waits = f"rank {rank} has made {updates} and waits at {elsewhere.at}"
            return found(signal=RANK_ELSEWHERE, message=f"{waits}; {here}")
    return None


def _is_within(one: ProcessFiles, *places: str) -> bool:
    return one.flight.exchange is not None and one.flight.exchange.within in places


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
