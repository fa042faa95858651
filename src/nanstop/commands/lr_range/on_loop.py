"""A learning-rate range test on the training loop of a script: its own steps on its own batches, at planned rates."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nanstop.commands.lr_range.job import LrRecorder, end, planned, save_nothing
from nanstop.hosts.patch_table import Table
from nanstop.session.off import IdleSession

_CLOSURE = "the optimizer calls a closure, so that a step has no loss of its own"
_INSIDE = "the updates happen inside backward, before the loss of a step is known"
_UNSEEN = (
    "the loss of a step is not seen: nothing was given to backward() that a model had computed"
)


def install(table: Table, *, is_loop: Callable[[], bool]) -> Callable[[Any, Any], LoopSweep]:
    """Have every optimizer step of a loop get its planned rate; return what loops open as their session.

    ``is_loop``: whether an update now is that of a loop, of which nothing else is known yet.
    """
    sweep = LoopSweep(LrRecorder(planned()), table)

    def before_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_loop() or sweep.is_open:
            has_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
            sweep.give_rate(optimizer, has_closure=has_closure)

    table.hook(register_optimizer_step_pre_hook(before_update))
    return sweep.opened


class LoopSweep(IdleSession):
    """Stands in for the session of a raw loop: keeps the loss of each window, and ends the process when all is known."""

    def __init__(self, recorder: LrRecorder, table: Table) -> None:
        super().__init__()
        self.series: Any = self  # a guard adds to it whatever it reads
        self._recorder = recorder
        self._table = table
        self._window: list[float] = []
        self._world_size = 1
        self.is_open = False

    def opened(self, _view: Any, facts: Any) -> LoopSweep:
        """Return itself as the session of a loop."""
        self.is_open = True
        save_nothing(self._table)
        self._world_size = facts.world_size
        if facts.veto != "yes":
            self._fail(_INSIDE)
        return self

    def add(self, name: str, _step: int, value: Any) -> None:
        """Note a loss of the window that is open. Synchronises the device."""
        if name == "loss_raw":
            self._window.append(float(value))

    def give_rate(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Give an optimizer the rate of this window."""
        if has_closure:
            self._fail(_CLOSURE)
        self._recorder.set_rate(optimizer, len(self._recorder.losses))

    def completed(self, _step: int) -> None:
        """Close the window, whose loss is that before its update; end the process after the last."""
        if not self._window:
            self._fail(_UNSEEN)
        self._recorder.losses.append(sum(self._window))
        self._window.clear()
        if self._recorder.is_over(world_size=self._world_size):
            self._end()

    def finish(self, _exit_code: int = 0) -> None:
        """Write what a loop that was over sooner has shown."""
        self._write()

    def _fail(self, problem: str) -> None:
        self._recorder.problem = problem
        self._end()

    def _end(self) -> None:
        self._write()
        end()

    def _write(self) -> None:
        if os.environ.get("RANK", "0") in ("", "0"):
            self._recorder.write()
