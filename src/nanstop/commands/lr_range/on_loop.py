"""A learning-rate range test on the training loop of a script.

Its own steps on its own batches, at planned rates.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nanstop.commands.lr_range.recorder import LrRecorder
from nanstop.hosts.patch_table import Table
from nanstop.hosts.script import autowatch
from nanstop.process.inject import dry_run_child
from nanstop.process.inject.dry_run import DryRun, answered
from nanstop.process.inject.save_nothing import save_nothing
from nanstop.ranks import is_first
from nanstop.records import RunFacts
from nanstop.records.codec import to_json
from nanstop.session.history import WHOLE, History
from nanstop.session.off import OffSession
from nanstop.session.watched_run import OpenSession
from nanstop.store.files import write_whole

if TYPE_CHECKING:
    from nanstop.replay.step import ModelView

_CLOSURE = "the optimizer calls a closure, so that a step has no loss of its own"
_INSIDE = "the updates happen inside backward, before the loss of a step is known"
_UNSEEN = (
    "the loss of a step is not seen: nothing was given to backward() that a model had computed"
)


def install(table: Table, dry_run: DryRun, recorder: LrRecorder) -> OpenSession:
    """Have every optimizer step of a loop get its planned rate.

    Return what loops open as their session.
    """
    sweep = LoopSweep(recorder, Path(dry_run.out), table)

    def before_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if sweep.is_open or not autowatch.is_paused():
            has_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
            sweep.give_rate(optimizer, has_closure=has_closure)

    table.hook(register_optimizer_step_pre_hook(before_update))
    return sweep.open


class LoopSweep(OffSession):
    """Stands in for the session of a raw loop.

    Keeps the loss of each window, and ends the process when all is known.
    """

    def __init__(self, recorder: LrRecorder, out: Path, table: Table) -> None:
        super().__init__()
        self.series = History(WHOLE)
        self._recorder = recorder
        self._out = out
        self._table = table
        self._world_size = 1
        self.is_open = False

    def open(self, _view: ModelView, facts: RunFacts) -> LoopSweep:
        """Return itself as the session of a loop."""
        self.is_open = True
        save_nothing(self._table)
        self._world_size = facts.world_size
        if facts.veto != "yes":
            self._fail(_INSIDE)
        return self

    def give_rate(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Give an optimizer the rate of this window."""
        if has_closure:
            self._fail(_CLOSURE)
        self._recorder.set_rate(optimizer, len(self._recorder.losses))

    def completed(self, step: int, *, optimizer: int | None = None) -> None:  # noqa: ARG002
        """Close the window, whose loss is that before its update.

        End the process after the last.
        """
        losses = [one.values for one in self.series.records() if one.name == "loss_raw"]
        if not losses:
            self._fail(_UNSEEN)
        self._recorder.losses.append(sum(losses[0]))
        self.series = History(WHOLE)
        if self._recorder.is_over(world_size=self._world_size):
            self._end()

    def finish(self, exit_code: int = 0) -> None:  # noqa: ARG002
        """Write the answer of a loop that ended before the sweep did."""
        error = getattr(sys, "last_value", None)
        if error is not None:
            self._recorder.ended = f"{type(error).__name__}: {error}"[:500]
        self._write()

    def _fail(self, problem: str) -> NoReturn:
        self._recorder.problem = problem
        self._end()

    def _end(self) -> NoReturn:
        self._write()
        dry_run_child.end()

    def _write(self) -> None:
        if is_first():
            write_whole(self._out, answered(result=to_json(self._recorder.measured())))
