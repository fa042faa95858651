"""The job of ``nanstop replay``: the training of a script, watched up to a step, nothing saved."""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanstop.commands.replay.result import Seen
from nanstop.hosts.patch_table import Table
from nanstop.process.inject import dry_run_child
from nanstop.process.inject.dry_run import DryRun, answered, current_dry_run
from nanstop.process.inject.dry_run_child import Target
from nanstop.process.inject.save_nothing import save_nothing
from nanstop.ranks import is_first
from nanstop.records import Atom, RunFacts
from nanstop.records.codec import to_json
from nanstop.session.watched_run import OpenSession
from nanstop.store.files import write_whole

if TYPE_CHECKING:
    from nanstop.replay.step import ModelView

ON_EVERY_RANK = True
"""It trains, and ranks train together."""


def run(target: Target, options: Mapping[str, Any]) -> Seen:
    """Return what is seen of a trainer's training that ends before the step is over.

    Where it comes to that step the process ends there, and this does not return.
    """
    from nanstop.hosts.trainer.watch import watch_trainer

    dry_run = current_dry_run()
    assert dry_run is not None
    assert target.train is not None
    training = Training(Path(dry_run.out), options)
    watch_trainer(target.trainer, training.open)
    try:
        target.train()
    except Exception as error:  # the script's own: shown as the script would have shown it
        traceback.print_exc()
        return training.seen(error)
    return training.seen()


def open_loop(dry_run: DryRun, table: Table) -> OpenSession:
    """Return what raw loops open as their session: one that ends with the step."""
    training = Training(Path(dry_run.out), dry_run.options)

    def open_session(view: ModelView, facts: RunFacts) -> Any:
        save_nothing(table)
        session = training.open(view, facts)
        session.finish = training.finish
        return session

    return open_session


class Training:
    """One training that is followed. ``options``: ``last``, the step that it ends with, and the
    ``atoms`` that are in force in it.
    """

    def __init__(self, out: Path, options: Mapping[str, Any]) -> None:
        self._out = out
        self._last: int = options["last"]
        self._atoms = tuple(Atom(**one) for one in options["atoms"])
        self._session: Any = None
        self._updates = 0

    def open(self, view: ModelView, facts: RunFacts) -> Any:
        """Return the session of a training."""
        from nanstop.decide.policy import Policy
        from nanstop.session.history import WHOLE, History
        from nanstop.session.session import Session
        from nanstop.store.incidents import Store

        session = Session(
            policy=Policy(quiet=True),
            store=Store(tempfile.mkdtemp(dir=self._out.parent)),
            view=view,
            facts=facts,
            announce=lambda _: None,
        )
        session.series = History(WHOLE)
        session.beat = self._after
        session.opened = lambda session: session.adopt(self._atoms)
        self._session = session
        return session

    def seen(self, error: BaseException | None = None) -> Seen:
        """Return what was seen so far. Synchronises the device."""
        if self._session is None:
            return Seen(ended=_said(error))
        losses = (one for one in self._session.series.records() if one.name == "loss_raw")
        return Seen(
            updates=self._updates,
            losses=next(losses, None),
            reports=tuple(self._session.reports),
            ended=_said(error),
        )

    def finish(self, exit_code: int = 0) -> None:  # noqa: ARG002 - of the script, which is over
        """Write the answer of a loop that ended before the incident's step."""
        self._write(getattr(sys, "last_value", None))

    def _after(self, step: int | None) -> None:
        if step is None:  # a training is over; there may be another
            return
        self._updates = max(self._updates, step + 1)
        if step >= self._last:
            self._write(None)
            dry_run_child.end()

    def _write(self, error: BaseException | None) -> None:
        if is_first():
            write_whole(self._out, answered(result=to_json(self.seen(error))))


def _said(error: BaseException | None) -> str:
    if error is None:
        return ""
    lines = str(error).strip().splitlines()
    return ": ".join((type(error).__name__, *lines[:1]))[:300]
