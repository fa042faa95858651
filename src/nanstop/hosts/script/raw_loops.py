"""The loops of a process that knows nothing of nanstop: what watches them, put together."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import distributed
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from nanstop.decide.policy import ENDED
from nanstop.errors import TrainingStopped
from nanstop.hosts.accelerate.asked_updates import AskedUpdates
from nanstop.hosts.loop.controller import LoopController
from nanstop.hosts.patch_table import Table
from nanstop.hosts.script.calls import Calls
from nanstop.hosts.script.judge import Judge
from nanstop.hosts.script.own_calls import CompiledCalls
from nanstop.hosts.script.resumed import Restored
from nanstop.hosts.script.schedules import ScheduleLines
from nanstop.hosts.script.sinks import Sinks
from nanstop.hosts.script.state import LoopState
from nanstop.hosts.script.steps import Steps
from nanstop.hosts.script.window import ScriptWindow
from nanstop.records import SourceLine
from nanstop.session.watched_run import OpenSession
from nanstop.tracing.places import user_line


class RawLoops:
    """``sinks``, ``backward``, ``grad`` and ``functional`` stand in for functions that scripts may
    import or call before there is an optimizer.
    """

    def __init__(
        self, open_session: OpenSession, table: Table, *, compiles_functions: bool = False
    ) -> None:
        self.controller = LoopController(open_session)
        self._table = table
        self.state = LoopState(table, compiles_functions=compiles_functions)
        self._updates: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._restored = Restored()
        self._steps = steps = Steps(
            self.controller, self._updates, self._restored, self.state.buffers
        )
        steps.written_at = lambda: self.state.accounts.written_at
        steps.weight_writes = self.state.accounts.weight_writes
        self._schedules = ScheduleLines(table)
        steps.lines_of = self.lines_of
        self.judge = Judge(self.state, steps, self.controller)
        self._asked = AskedUpdates(
            lambda optimizer: self._updates.get(optimizer, 0),
            lambda: self.state.idle,
            lambda: 0 if self.state.window.closed else len(self.state.window.micros),
            self.judge.learned,
        )
        self._calls = Calls(self.state, self.judge, table)
        self.backward, self.grad = self._calls.backward, self._calls.asks.grad
        self.functional = self._calls.asks.functional
        self.sinks = Sinks(self.state, self.judge, table, take_asked=self._calls.asks.take)
        self.call_compiled = CompiledCalls(
            self.state, self.judge, self._calls.asks.one_call, self.sinks
        ).call

    def install(self) -> None:
        """Replace torch's functions in the table."""
        self.sinks.install()
        self._restored.install(self._table)
        self._schedules.install()
        self._calls.install()
        rows = self.controller.data_rows
        rows.tape_now = self.state.tape_now
        self._table.replace(DataLoader, "_get_iterator", rows.made_iterator)
        if distributed.is_available():
            from torch.distributed.algorithms.join import Join

            self._table.replace(Join, "__exit__", self._steps.joined)

    def imported(self) -> None:
        """Stand in for functions of what has been imported by now."""
        self._asked.install(self._table)
        self._calls.imported()
        self.sinks.imported()

    def end(self) -> None:
        """Look once more at what is under way, and let go of it."""
        if self.state.idle:
            self._settle()
            ended_well = getattr(sys, "last_value", None) is None
            at, optimizers = self.controller.step_id(), list(self._updates)
            never = chain(self._asked.never_made(at), self.judge.never_made(optimizers, at))
            for account in never if ended_well else ():
                self.judge.never_updated(account)
        self._leave()

    def _settle(self) -> None:
        with suppress(TrainingStopped):  # it is over
            self.judge.awaited.settle()
            self.judge.left_out.look(ENDED)

    def _leave(self) -> None:
        self.state.leave()
        self.state.window = ScriptWindow(closed=True)

    def trained(self) -> list[ref[Any]]:
        """Return what a script has to hold so as to go on with what it has trained last, nothing
        where that is not to be asked now, or remedies are in force on it.
        """
        view, session = self.controller.view, self.controller.session
        if view is None or session is None or session.in_force or not self.state.idle:
            return []
        return [ref(view.optimizer or view.root), *map(ref, view.others)]

    def let_go(self) -> None:
        """End the training of what the script holds no more."""
        self._settle()
        self._leave()
        self._steps.forget()
        self.state.accounts.leave_own()
        with self.state.pause():
            self.controller.let_go()

    def finish(self, exit_code: int) -> None:
        """Finish the session: what is run again for it has no part in the loop."""
        with self.state.pause():
            self.controller.finish(exit_code)

    def optimizers_at_work(self) -> list[Optimizer]:
        """Return the optimizers that have made an update."""
        return [optimizer for optimizer, num in self._updates.items() if num]

    def lines_of(self, optimizer: Any) -> dict[str, SourceLine | None]:
        """Return the lines that made an optimizer and its schedule, as fields of ``RunFacts``."""
        made = self.state.accounts.made_at(optimizer)
        return {"optimizer_at": made, **self._schedules.of(optimizer)}

    def made_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer: the first sink of a window may not name it."""
        self._updates[optimizer] = 0
        self.imported()
        self.state.accounts.made(optimizer, user_line())
        self.state.by_hand = False
        self.state.expect_micro()
