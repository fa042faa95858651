"""A window, or the updates since a snapshot, made anew for good."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from nanstop.decide.agreement import Ranks, on_every_rank
from nanstop.decide.decision import Decision
from nanstop.errors import NanstopError
from nanstop.hosts.window.host import HostStep, WindowHost
from nanstop.replay.copies.rewind import Rewind
from nanstop.replay.step import trainable_of
from nanstop.replay.untouched import versions_kept

_log = logging.getLogger("nanstop")


def made_anew(
    host: WindowHost,
    together: Ranks,
    step: HostStep,
    decision: Decision,
    rewind: Rewind | None,
    problem: str,
) -> str:
    """Redo a window, before it every update since the snapshot where that was resolved.

    Return what went wrong, on this rank or another of ``together``; ``problem``: what is known to
    stand in the way.
    """

    def ask() -> None:
        found = problem or step.obstacle() or step.replicas.obstacle()
        if found:
            raise NanstopError(found)

    try:
        on_every_rank(together, "redo", ask)
        if decision.kind == "rollback" and rewind is not None:
            go_back(host, together, decision, rewind, rewind.steps)
            step.set_rates()
        host.redo(step, decision.atoms)
    except NanstopError as error:
        return error.message
    except Exception as error:  # a remedy that fails must not end the run that it was to save
        _log.warning("nanstop: the window could not be redone (%s)", named(error))
        return named(error)
    return ""


def go_back(
    host: WindowHost,
    together: Ranks,
    decision: Decision,
    rewind: Rewind | None,
    steps: Sequence[Any],
) -> None:
    """Apply updates anew, the cure being on for the rest of the run:
    from the snapshot on, where there is one.
    """
    trainable = trainable_of(steps[-1].view) if rewind is None else rewind.snapshot.trainable
    with versions_kept(trainable.tensors()):
        if rewind is not None:
            rewind.restore()
        host.session.adopt(decision.adopt)
        with ExitStack() as stack:
            for step in steps:
                stack.enter_context(step.collectives.together(together))
            if steps:
                host.update_anew(steps)


def named(error: Exception) -> str:
    """Return an error as a line of the log names it."""
    return f"{type(error).__name__}: {error}"
