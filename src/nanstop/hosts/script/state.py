"""What the stand-ins of an unchanged loop share.

Its window, the micro-batch that is open, and what is recorded of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import get_worker_info

from nanstop.hosts.gradient_writes import GradientWrites
from nanstop.hosts.loop.micro import Micro, UnseenMicro
from nanstop.hosts.patch_table import Table
from nanstop.hosts.script.evaluations import Evaluations
from nanstop.hosts.script.window import (
    BufferGroup,
    RootSearch,
    ScriptWindow,
    device_of,
    models_in,
    read_by,
)
from nanstop.hosts.sharded.models import Exchangers, reduces
from nanstop.hosts.tape.left_behind import LeftBehind
from nanstop.hosts.tape.tape import Tape
from nanstop.hosts.tape.tape_budget import TapeBudget
from nanstop.hosts.tape.tape_calls import Cuts
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.hosts.tape.weight_marks import WeightMarks
from nanstop.measure.accounts.gradient_accounts import GradientAccounts
from nanstop.replay.conditions import inside_transform
from nanstop.replay.rng import RngNotes
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

MAX_MICROS = 256
"""Micro-batches of a window that are kept:
a loop whose updates are not seen must not fill the memory.
"""
_log = logging.getLogger("nanstop")


class LoopState:
    """``on_error`` is told what the script's own ops raise, ``on_number`` what is not finite among
    the numbers that it reads between its steps.

    ``paused`` above 0: every function is torch's own.

    ``met_failure``: from then on every op is recorded. ``compiles_functions``: the script does, and
    nobody sees what such a function writes to.
    ``by_hand``: no optimizer was made yet, the script changes its weights by itself.
    ``updated_inside``: optimizers that hooks on gradients have called inside the last backward.
    """

    def __init__(self, table: Table, *, compiles_functions: bool = False) -> None:
        self.window = ScriptWindow(closed=True)
        self.micro: TapedMicro | None = None
        self.buffers = BufferGroup()
        self.roots = RootSearch(table)
        self.paused = 0
        self.met_failure = False
        self.by_hand = True
        self.compiles_functions = compiles_functions
        self.in_backward, self.num_backwards = False, 0
        self.updated_inside: list[Optimizer] = []
        self._owner: dict[str, int] = {}
        self._is_left = False
        self.budget = TapeBudget()
        self.on_error: Callable[[Exception], None] = lambda _: None
        self.accounts = GradientAccounts()
        self._writes = GradientWrites(self.accounts)
        self.on_number: Callable[[float, int | None], None] = lambda *_: None
        self.on_left: Callable[[str], None] = lambda _: None
        """Told why nothing is watched from here on."""
        self.evaluations = Evaluations()
        self._lingering: list[Tape] = []
        self._early: Tape | None = None
        self._marks = WeightMarks()
        self._left = LeftBehind(num_searches=8)
        self._left.on_model = lambda module: self.begin_window().add(module, self.buffers)
        self.rng = RngNotes()
        self._exchangers = Exchangers()

    @property
    def idle(self) -> bool:
        """Whether a call now is the loop's own.

        Not paused, not in a model call, a backward, a transform or a worker.
        """
        return (
            not torch.compiler.is_compiling()  # before what a compiler cannot look into
            and not torch._C._is_tracing()
            and not (self.paused or self._is_left)
            and self._owner.get("trains") in (None, threading.get_ident())
            and get_worker_info() is None
            and not inside_transform()
        )

    @property
    def thread(self) -> int | None:
        """The thread that trains: the first that called a model."""
        return self._owner.get("trains")

    def claim(self) -> None:
        """Have the calling thread be the one that trains, where none is yet."""
        self._owner.setdefault("trains", threading.get_ident())  # in one step of the interpreter

    def takes_over(self, module: nn.Module) -> bool:
        """Return whether a model call that is not the loop's own makes its thread the one that
        trains: the one before has ended.

        Where two threads train at once neither is watched: one would read gradients that a backward
        of the other is writing. Replicas of ``DataParallel`` and what a backward computes again, in
        threads of torch's own, are the first thread's.
        """
        if torch.compiler.is_compiling():
            return False
        mine = self.thread in (None, threading.get_ident())
        if mine or self._is_left or not torch.is_grad_enabled():
            return False
        if torch._C._current_graph_task_id() != -1 or getattr(module, "_is_replica", False):
            return False
        if any(one.ident == self.thread for one in threading.enumerate()):
            self.not_watching("several threads train at once")
            return False
        self._owner.clear()
        return self.idle

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave everything to torch inside."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    @contextmanager
    def untaped(self) -> Iterator[Tape | None]:
        """Keep the tape off the stack of function modes inside, if it was on it: the tape, or
        None.
        """
        tape = self._tape
        was_on = tape is not None and tape.stop()
        try:
            yield tape if was_on else None
        finally:
            if tape is not None and was_on and tape is self._tape:
                tape.start()

    @property
    def _tape(self) -> Tape | None:
        return self.micro.tape if self.micro is not None else self._early

    def tape_now(self) -> Tape | None:
        """Return the tape that records just now."""
        return self._tape if self._tape is not None and self._tape.is_on else None

    def drop(self) -> None:
        """Let go of a micro-batch that no backward has closed, or that may go on no longer."""
        for tape in self._lingering:
            tape.stop()
        self._lingering.clear()
        tape = self._tape
        if tape is not None:
            tape.stop()
            if tape.lingers:
                self._lingering.append(tape)
        self.micro = None
        if self._early is not None and (self.by_hand or not self._early.is_blank):
            self._early = None

    def account(self, look: Callable[..., Any], *given: Any) -> Any:
        """Return what the accounts look at now."""
        return self.accounts.guarded(look, *given)

    def watch_writes(self) -> None:
        """Have the lines that write to gradients or to weights noted, where an account asks."""
        if self.accounts.is_looking:
            self._writes.start(or_weights=True)

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Have no lines that write noted inside, if they were."""
        was_on = self._writes.stop()
        try:
            yield
        finally:
            if was_on:
                self.watch_writes()

    def ignore_writes(self) -> None:
        """Note no lines that write to gradients: torch, a model or nanstop itself is at work."""
        if self._writes.num_stacks:
            self._writes.stop()

    def leave(self) -> None:
        """Leave the stack of function modes: whoever goes on here has no part in the loop."""
        self.drop()
        self.ignore_writes()

    def mark_gradients(self) -> None:
        """Note which gradients there are, as a backward or a sink leaves them. No device work."""
        window = self.window
        window.gradients = self._marks.of_gradients(window.roots.values())

    def look_for_writes(self) -> bool:
        """Return whether the script itself has written to gradients since they were marked."""
        window, accounts = self.window, self.accounts
        is_known = window.is_rewritten and not window.judged  # by a sink that has marked them anew
        if is_known or window.gradients is None or window.closed:
            return False
        differ = self._marks.of_gradients(window.roots.values()) != window.gradients
        window.is_rewritten |= differ or accounts.are_written
        accounts.are_written |= differ
        return differ

    def begin_sink(self) -> bool:
        """Do so with the gradients that the script is about to unscale, clip or apply."""
        is_rewritten = self.look_for_writes()
        self.account(self.accounts.sinking)
        return is_rewritten

    def stop_expecting(self) -> None:
        """Record nothing while the gradients come to an update."""
        if self.micro is None:
            self.drop()

    def set_aside(self) -> None:
        """Record nothing until ``expect_micro``, and keep what was recorded: an optimizer is about
        to evaluate its closure.
        """
        if self.micro is None and self._early is not None and not self._early.stop():
            self.drop()

    def expect_micro(self) -> None:
        """Record what the script makes of its own tensors before the next model call, with what was
        set aside.

        See ``Tape``.
        """
        wanted, early = self._takes_outer, self._early
        if early is not None and (wanted or not early.is_blank) and not early.is_on and self.idle:
            early.start()
        elif self._tape is None and wanted and self.idle:
            tape = self._new_tape("cpu")
            if tape.start():
                self._early = tape

    def expect_first(self) -> Tape | None:
        """Record from here on what a script without an optimizer makes; return the tape, None where
        that may not be.
        """
        self.roots.begin()
        self.expect_micro()
        return self._early

    def drop_unused(self) -> None:
        """Let go of what was recorded of a script that has made no backward: something else than
        itself makes its updates.
        """
        if self.by_hand and not self.window.micros:
            self.drop()

    def begin_window(self) -> ScriptWindow:
        """Open a window where the last one is closed; return the open one."""
        if self.window.closed:
            self.window = ScriptWindow(start=self.buffers.note())
        return self.window

    def begin(self, module: nn.Module) -> TapedMicro:
        """Return the micro-batch that a call of ``module`` belongs to.

        The one that is open, or a new one.
        """
        if self.window.closed and self.micro is not None:
            self.drop()
        self.evaluations.clear()
        module = self._exchangers.of(module)
        self.begin_window().add(module, self.buffers)
        if self.micro is None or self.micro.loss is not None:
            if self.micro is not None:
                self.drop()
            self.budget.begun()
            self.micro = TapedMicro(
                self._begun_tape(device_of(module)), self.rng.note(), self._marks
            )
        self.micro.reduced |= reduces(module)
        return self.micro

    def begin_without_model(self, losses: list[Tensor]) -> TapedMicro | None:
        """Return the micro-batch of losses of bare tensors alone, None where it was not seen."""
        tape = self._early
        if tape is None or tape.problem or tape.lingers:
            return None
        if not losses or any(tape.slot(loss) is None for loss in losses):
            return None
        self.begin_window()
        self.budget.begun()
        self.roots.begin()
        tape.stop()
        tape.device = losses[0].device.type
        self.micro, self._early = TapedMicro(tape, self.rng.note(), self._marks), None
        return self.micro

    def refused_between_steps(self) -> TapedMicro | None:
        """Return what the script has made since the last step, if what it did last was refused
        because of a number; None where nothing says so.
        """
        tape = self._early
        if tape is None or not tape.ends_refused:
            return None
        self.drop()
        return TapedMicro(tape, self.rng.note(), self._marks)

    def read_of(self, slot: int | None, number: float) -> Iterator[tuple[Micro, list[nn.Module]]]:
        """Yield what a number that the script has read since the last step may be of, and models:
        the evaluations, the latest first, and forget them; then its loss, of what it has made.
        """
        yield from ((one, [one.module]) for one in self.evaluations.take(number))
        if slot is None or (micro := self.recorded_since()) is None:
            return
        micro.tape.losses, micro.loss = [slot], torch.tensor(number)
        if modules := models_in(micro) or read_by(micro, self.window.roots.values()):
            yield micro, modules

    def recorded_since(self) -> TapedMicro | None:
        """Return what was recorded since the last step as a micro-batch of its own."""
        if self._early is None or self._early.problem:
            return None
        return TapedMicro(self._early, self.rng.note(), self._marks).until_now()

    def _begun_tape(self, device: str) -> Tape:
        """Return the tape of a micro-batch that begins now.

        The one that has recorded since the last, or a new one.
        """
        tape, self._early = self._early, None
        if tape is not None:
            tape.stop()
        if tape is None or tape.problem or tape.lingers:
            tape = self._new_tape(device)
        tape.device, tape.takes_outer = device, self._takes_outer
        return tape

    def _new_tape(self, device: str) -> Tape:
        tape = Tape(device, self.on_error, self._left)
        tape.on_number, tape.on_write = self.on_number, self._keep
        tape.cuts = Cuts() if self.by_hand else None
        return tape

    def _keep(self, written: Tensor) -> None:
        """Have what the open window was given of a tensor outlive a write to it."""
        micros = () if self.window.closed else self.window.micros
        tapes = [micro.tape for micro in micros if isinstance(micro, TapedMicro)]
        for tape in tapes if self._tape is None or self._tape in tapes else [*tapes, self._tape]:
            tape.keep(written)

    @property
    def _takes_outer(self) -> bool:
        return self.budget.outer_is_cheap or self.met_failure

    def not_watching(self, reason: str) -> None:
        """Leave everything to torch from here on, and say why."""
        _log.warning("nanstop: this loop is not watched any more (%s)", reason)
        self.on_left(reason)
        self._is_left = True
        self._left.forget()
        self.drop()

    def keep(self, micro: Micro) -> None:
        if len(self.window.micros) >= MAX_MICROS:
            self.window.micros = [UnseenMicro(f"the window has more than {MAX_MICROS} backwards")]
            self.window.clips = []
        self.window.micros.append(micro)
        # One model's own samples are read before its update, or never again.
        if len(self.window.roots) > 1 and isinstance(micro, TapedMicro) and not self.by_hand:
            self._left.closed(micro.tape)

    @contextmanager
    def inside_backward(self) -> Iterator[None]:
        """Leave all to torch inside; ``updated_inside``: optimizers that hooks call there."""
        self.updated_inside.clear()
        self.in_backward = True
        try:
            with self.pause():
                yield
        finally:
            self.in_backward = False
