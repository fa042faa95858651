"""Watches an unchanged training loop: what stands in for torch's own functions while nanstop watches a script.

A window is what lies between two optimizer updates. Its *first sink* (``GradScaler.unscale_`` or ``step``,
``clip_grad_norm_``, ``clip_grad_value_``, else the optimizer's step) is where the flag is read and a decision carried
out: the optimizer alone is too late, it is never called for a step that the scaler leaves out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nanstop.detect.numeric_errors import is_numeric
from nanstop.errors import TrainingStopped
from nanstop.hosts.loop.controller import Guard, Verdict
from nanstop.hosts.loop.step import UnseenMicro
from nanstop.hosts.loop.taped_micro import TapedMicro
from nanstop.hosts.loop.tensors import total
from nanstop.hosts.patch_table import Table
from nanstop.hosts.script.calls import Calls
from nanstop.hosts.script.moved_weights import has_moved
from nanstop.hosts.script.resumed import Restored
from nanstop.hosts.script.steps import Steps
from nanstop.hosts.script.window import (
    Held,
    Window,
    norm_of,
    parameters_of,
)
from nanstop.numerics.weights import param_groups
from nanstop.session.watched_run import OpenSession
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

_INSIDE = "a hook on gradients updates the weights inside backward"
_log = logging.getLogger("nanstop")


class RawLoops:
    """Stands in for the functions of torch in which a window's gradients end: the sinks.

    ``clip_norm`` and ``clip_value`` are called by whoever has replaced torch's, the others are put into the table.
    """

    def __init__(
        self, open_session: OpenSession, table: Table, *, compiles_functions: bool = False
    ) -> None:
        self.guard = Guard(open_session)
        self._table = table
        self._calls = Calls(table, self._raised, self._given_up, self._updated_inside)
        self.updates: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._held = Held()
        self._in_scaler = False
        self._restored = Restored()
        self._steps = Steps(self.guard, self.updates, self._restored, lambda: self._calls.buffers)
        self._calls.compiles_functions = compiles_functions

    def install(self) -> None:
        """Replace torch's functions in the table."""
        table = self._table
        table.replace(torch.amp.GradScaler, "unscale_", self.unscale)
        table.replace(torch.amp.GradScaler, "step", self.scaler_step)
        table.replace(Optimizer, "zero_grad", self.empty_gradients)
        table.replace(nn.Module, "zero_grad", self.empty_gradients)
        table.hook(register_optimizer_step_pre_hook(self.before_update))
        table.hook(register_optimizer_step_post_hook(self.after_update))
        self._restored.install(table)
        self._calls.install()

    def stop_taping(self) -> None:
        """Record no ops from here on: the script compiles functions, and compiled code must not see the tape."""
        self._calls.compiles_functions = True

    def end(self) -> None:
        """Look once more at what is under way, and let go of it."""
        if self._calls.idle:
            with suppress(TrainingStopped):  # it is over
                self._calls.look_for_given_up()
        self._calls.drop()
        self._calls.window = Window(closed=True)

    def died(self) -> None:
        """Look at gradients that no sink has seen, if the script raises while it has them: it may have seen for itself."""
        window = self._calls.window
        if not self._calls.idle or not window.micros or window.closed or window.judged:
            return
        parameters = [p for root in window.roots.values() for p in root.parameters()]
        norm = norm_of(parameters)
        if norm is not None and not bool(norm.isfinite()):
            with suppress(TrainingStopped):  # it has ended by an exception of its own
                self._judge(parameters, norm, can_redo=False)

    def pause(self) -> AbstractContextManager[None]:
        """Leave everything to torch inside."""
        return self._calls.pause()

    def optimizers_at_work(self) -> list[Optimizer]:
        """Return the optimizers that have made an update."""
        return [optimizer for optimizer, num in self.updates.items() if num]

    def made_optimizer(self, optimizer: Optimizer) -> None:
        """Note an optimizer: the first sink of a window may not name it."""
        self.updates[optimizer] = 0
        self._calls.expect_micro()

    def clip_norm(
        self,
        original: Any,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Stand in for ``clip_grad_norm_``: the norm that it computes anyway is the flag."""
        if not self._calls.idle or not self._calls.window.micros or self._calls.window.closed:
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        self._calls.stop_expecting()
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        measure = partial(norm_of, parameters, norm_type, foreach)
        self._calls.window.clip = float(max_norm)
        self._calls.window.note("clip")
        norm = measure()
        if norm is not None and self._judge(parameters, norm).redone:
            norm = measure()
        if norm is None or error_if_nonfinite:
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach)
        return norm

    def clip_value(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``clip_grad_value_``, which turns Inf into the bound and leaves NaN."""
        if not self._calls.idle or not self._calls.window.micros or self._calls.window.closed:
            return original(parameters, *args, **kwargs)
        self._calls.stop_expecting()
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._calls.window.note("clip")
        self._judge(parameters, norm_of(parameters))
        return original(parameters, *args, **kwargs)

    def empty_gradients(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``zero_grad``: backwards whose gradients are thrown away belong to no update."""
        with self._calls.untaped():
            original(owner, *args, **kwargs)
        window = self._calls.window
        if not self._calls.idle or not window.micros or window.closed or window.judged:
            return
        roots = window.roots.values()
        if all(p.grad is None for root in roots for p in root.parameters()):
            window.micros = []

    def unscale(self, original: Any, scaler: Any, optimizer: Optimizer) -> None:
        """Stand in for ``GradScaler.unscale_``: what it finds is the flag."""
        self._calls.stop_expecting()
        try:
            original(scaler, optimizer)
        except ValueError as error:  # of gradients in float16, which it refuses
            self._refused(optimizer, error)
            raise
        if not self._calls.idle or not scaler.is_enabled() or not self._calls.window.micros:
            return
        self._calls.window.scaler = scaler
        self._calls.window.note("unscale")
        found = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        if self._judge(parameters_of(optimizer), None, optimizer, found).redone:
            scaler._per_optimizer_states.pop(id(optimizer))
            original(scaler, optimizer)

    def scaler_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        """Stand in for ``GradScaler.step``, which calls no optimizer when it found an Inf."""
        if not self._calls.idle or not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kw)
        self._calls.stop_expecting()
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                self._calls.window.scaler = scaler
                self._judge(parameters_of(optimizer), norm_of(parameters_of(optimizer)), optimizer)
            else:
                scaler.unscale_(optimizer)
        self._in_scaler = True
        try:
            return original(scaler, optimizer, *args, **kw)
        finally:
            self._in_scaler = False
            self._ended(optimizer)

    def before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at gradients that no earlier sink saw, and hold back a vetoed update; an optimizer's pre-hook."""
        if not self._calls.idle:
            return None
        self._calls.stop_expecting()
        self._held = Held()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            return (args[0],), {**kwargs, "closure": partial(self._closure, closure, optimizer)}
        window = self._calls.window
        if not self._in_scaler:
            window.let_go_of_scaler(parameters_of(optimizer))
        unseen = [p for p in parameters_of(optimizer) if id(p) not in self._calls.window.judged]
        if self._calls.window.closed or any(p.grad is not None for p in unseen):
            self._judge(unseen, norm_of(unseen), optimizer)
        if window.vetoed or self._is_settled(optimizer):
            self._held.take(parameters_of(optimizer))
        return None

    def after_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Put held back gradients where the script left them; an optimizer's post-hook."""
        if self._calls.in_backward:
            self._calls.updated_inside.append(optimizer)
        if not self._calls.idle:
            return
        self._held.give_back()
        if not self._in_scaler:
            self._ended(optimizer)

    def _closure(self, closure: Callable[[], Any], optimizer: Optimizer) -> Any:
        with torch.enable_grad():
            result = closure()
        parameters = parameters_of(optimizer)
        # The closure's own result is out already: a window made anew would not match it.
        self._judge(parameters, norm_of(parameters), optimizer, can_redo=False)
        if self._calls.window.vetoed:
            self._held.take(parameters_of(optimizer))
        self._calls.window.closed = True
        return result

    def _is_settled(self, optimizer: Optimizer) -> bool:
        """Return whether an update has been applied by now, or is to be left out."""
        try:
            with self._calls.pause(), torch.no_grad():
                settled = self.guard.last_look(optimizer)
        except TrainingStopped:
            window = self._calls.window
            window.failed = window.vetoed = window.closed = True
            raise
        self._calls.window.vetoed |= settled is False
        return settled is not None

    def _ended(self, optimizer: Optimizer) -> None:
        if self.guard.session is None and self._calls.window.micros:
            # No sink looked at this window: not one parameter of the optimizer has a gradient.
            self._judge((), None, optimizer, can_redo=False)
        self._calls.window.closed = True
        self._calls.drop()
        self._calls.stop_looking()
        self.guard.num_updates = self.updates.get(optimizer, 0)
        self.updates[optimizer] = self.guard.num_updates + 1
        self.guard.completed(applied=not self._calls.window.vetoed)
        self._calls.expect_micro()

    def _judge(
        self,
        parameters: Sequence[Tensor],
        norm: Tensor | None,
        optimizer: Optimizer | None = None,
        found_inf: Sequence[Tensor] = (),
        *,
        can_redo: bool = True,
    ) -> Verdict:
        window, verdict = self._calls.window, Verdict()
        self._calls.drop()
        first, seen = not window.judged, {id(p) for p in parameters}
        if not first and seen <= window.judged and not window.closed:
            return verdict
        if (
            window.closed and window.failed
        ):  # of another optimizer: one failure, already looked into
            return Verdict(apply=not window.vetoed, failed=True)
        window.judged |= seen
        try:
            with self._calls.pause(), torch.no_grad():
                step = self._steps.step(window, optimizer, parameters)
                moved = has_moved(step, norm)
                may = can_redo and first and not window.closed and not moved
                verdict = self.guard.judge(step, norm, found_inf, can_redo=may)
        except TrainingStopped:
            window.failed = window.vetoed = window.closed = True
            raise
        except Exception as error:  # nanstop is never the reason a run dies
            self._calls.not_watching(f"{type(error).__name__}: {error}")
        self._calls.met_failure |= verdict.failed
        window.failed |= verdict.failed
        window.vetoed |= not verdict.apply
        return verdict

    def _raised(self, error: Exception) -> None:
        """Report an exception of the script that says that a number was bad."""
        micro = self._calls.micro
        if micro is None or not self._calls.idle or not is_numeric(error):
            return
        self._calls.drop()
        self._calls.met_failure = True
        try:
            with self._calls.pause():
                self._calls.keep(micro)
                self.guard.raised(self._steps.step(self._calls.window, None, ()), error)
        except Exception as own:  # nanstop is never the reason a run dies
            _log.warning(
                "nanstop: the exception was not investigated (%s: %s)", type(own).__name__, own
            )
        self._calls.window.closed = True

    def _refused(self, optimizer: Optimizer, error: Exception) -> None:
        """Have the set-up looked at anew where a scaler does not take the gradients."""
        window = self._calls.window
        if not self._calls.idle or not window.micros or not is_numeric(error):
            return
        try:
            with self._calls.pause():
                step = self._steps.step(window, optimizer, parameters_of(optimizer))
                groups = param_groups(step.view.root.named_parameters())
                self.guard.session.learned(param_groups=groups)
        except Exception as own:  # nanstop is never the reason a run dies
            _log.warning("nanstop: the set-up was not read (%s: %s)", type(own).__name__, own)

    def _given_up(self, micro: TapedMicro) -> None:
        """Report a micro-batch that the script left out by itself; there is no update to hold back."""
        window = self._calls.window
        self._calls.met_failure = True
        window.micros.append(micro)
        try:
            with self._calls.pause():
                self.guard.given_up(self._steps.step(window, None, ()))
        except TrainingStopped:
            raise
        except Exception as own:  # nanstop is never the reason a run dies
            _log.warning("nanstop: the loss was not investigated (%s: %s)", type(own).__name__, own)
        finally:
            window.micros.remove(micro)

    def _updated_inside(self, optimizers: list[Optimizer]) -> None:
        """Report a window whose update was made inside its backward: nothing can be held back or run again."""
        window = self._calls.window
        losses = [m.loss for m in window.micros if m.loss is not None]
        window.micros = [UnseenMicro(_INSIDE, total(losses))]
        window.updated_inside = True
        self._judge(parameters_of(optimizers[0]), None, optimizers[0], can_redo=False)
        self._ended(optimizers[0])
