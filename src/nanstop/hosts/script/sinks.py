"""Watches an unchanged training loop.

What stands in for torch's own functions while nanstop watches a script.

A window is what lies between two optimizer updates. Its *first sink* (``GradScaler.unscale_`` or
``step``, ``clip_grad_norm_``, ``clip_grad_value_``, else the optimizer's step) is where the flag is
read and a decision carried out: the optimizer alone is too late, it is never called for a step that
the scaler leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nanstop.detect.empty_clips import EmptyClips
from nanstop.detect.sentinel import norm_here
from nanstop.hosts.loop.held_update import HeldUpdate
from nanstop.hosts.patch_table import Table
from nanstop.hosts.script.judge import Judge
from nanstop.hosts.script.state import LoopState
from nanstop.hosts.script.updates.awaited import Awaited
from nanstop.hosts.script.updates.closures import Closures, OpenUpdate
from nanstop.hosts.script.updates.open_updates import OpenUpdates
from nanstop.hosts.script.updates.own_hooks import OwnHooks
from nanstop.hosts.script.window import clip_by, clip_norm, norm_of
from nanstop.hosts.sharded.engine import Engine, engine_class
from nanstop.numerics.trained import gradients_held, held_by
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import user_line

__tracebackhide__ = passes_through


class Sinks:
    """Stands in for the functions of torch in which a window's gradients end.

    ``take_asked``: see ``Asks.take``. ``clip_norm`` and ``clip_value`` are called by whoever has
    replaced torch's, the others are put into the table.
    """

    def __init__(
        self,
        state: LoopState,
        judge: Judge,
        table: Table,
        *,
        take_asked: Callable[[Callable[[], Sequence[Tensor]]], None],
    ) -> None:
        self._state = state
        self._judge = judge
        self._table = table
        self._take_asked = take_asked
        self._closures = Closures()
        self._open = OpenUpdates(self._closures)
        self._empty_clips = EmptyClips()
        self._in_scaler = False
        self._own_hooks = OwnHooks(self._look_inside)

    def install(self) -> None:
        """Replace torch's functions in the table."""
        table = self._table
        table.replace(torch.amp.GradScaler, "unscale_", self.unscale)
        table.replace(torch.amp.GradScaler, "step", self.scaler_step)
        table.replace(Optimizer, "zero_grad", self.empty_gradients)
        table.replace(nn.Module, "zero_grad", self.empty_gradients)
        table.hook(register_optimizer_step_pre_hook(self.before_update))
        table.hook(register_optimizer_step_post_hook(self.after_update))

    def imported(self) -> None:
        """Stand in for what ends a window in an engine that has been imported by now."""
        kind = engine_class()
        if kind is not None and hasattr(kind, "_take_model_step"):
            self._table.replace(kind, "_take_model_step", self.engine_update)

    def engine_update(self, original: Any, engine: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for what DeepSpeed's engine makes of the gradients of a window: unscaling,
        clipping and the update in one.
        """
        update = partial(original, engine, *args, **kwargs)
        window, optimizer = self._state.window, engine.basic_optimizer
        if not self._state.idle or not window.micros or window.closed or optimizer is None:
            update()
            return
        self._state.stop_expecting()
        self._state.ignore_writes()
        self._state.accounts.leave(optimizer)
        self._state.begin_sink()
        known = Engine(engine)
        window.by_engine, window.no_veto = True, known.no_veto()
        for micro in window.micros:  # which of them ends a window is not known when it begins
            micro.reduced = micro is window.micros[-1]
        window.clip = engine.gradient_clipping() or None
        parameters = [*engine.module.parameters(), *held_by(optimizer)]
        self._judge.judge(parameters, known.norm(), optimizer, anew=known.norm)
        try:
            with self._state.pause():
                known.leave_out(update) if window.vetoed else update()
        finally:
            self._judge.ended(optimizer)

    def compiled_update(self, optimizer: Optimizer) -> HeldUpdate:
        """Look at gradients before an update that compiled code may make, which calls no hooks;
        return what it is not to see, or to do.
        """
        self.before_update(optimizer, (optimizer,), {})
        update = self._open.of(optimizer)
        return update.held if update is not None else HeldUpdate(optimizer)

    def compiled_updated(self, optimizer: Optimizer, *, was_made: bool) -> None:
        """End it; what has made no update was no more than another look at the gradients."""
        if was_made:
            self.after_update(optimizer, (), {})
        else:
            self._open.end(optimizer).held.give_back()
            self._state.accounts.drop()

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
        if not self._state.idle:
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        if self._judge.awaited.present is not None:
            self._judge.awaited.settle()
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        is_late = self._state.window.closed
        self._empty_clips.clipped(parameters, float(max_norm), user_line, is_late=is_late)
        self._take_asked(lambda: parameters)
        if not self._state.window.micros or self._state.window.closed:
            return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
        self._state.stop_expecting()
        self._state.begin_sink()
        measure = partial(norm_of, parameters, norm_type, foreach)
        self._state.window.clip = float(max_norm)
        again = partial(clip_norm, parameters, max_norm, norm_type, foreach)
        self._state.window.note_clip(parameters, again)
        norm = measure()
        if norm is not None and not error_if_nonfinite:
            clip = partial(clip_by, parameters, max_norm, foreach)
            if self._judge.awaited.clipped(parameters, norm, measure, clip):
                self._state.mark_gradients()
                return norm
        if norm is not None and self._judge.judge(parameters, norm).redone:
            norm = measure()
        if error_if_nonfinite:
            self._judge.judge_refused_clip(parameters, norm)
        if norm is None or error_if_nonfinite:
            # An update that is left out takes none of them.
            raises = error_if_nonfinite and not self._state.window.vetoed
            norm = original(parameters, max_norm, norm_type, raises, foreach)
        else:
            clip_by(parameters, max_norm, foreach, norm)
        self._state.mark_gradients()
        return norm

    def clip_value(self, original: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``clip_grad_value_``, which turns Inf into the bound and leaves NaN."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._state.idle:
            self._judge.awaited.settle()
            self._take_asked(lambda: parameters)
        if not self._state.idle or not self._state.window.micros or self._state.window.closed:
            original(parameters, *args, **kwargs)
            return
        self._state.stop_expecting()
        self._state.begin_sink()
        self._state.window.note_clip(parameters, partial(original, parameters, *args, **kwargs))
        self._judge.judge(parameters, norm_here(parameters))
        original(parameters, *args, **kwargs)
        self._state.mark_gradients()

    def empty_gradients(self, original: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        """Stand in for ``zero_grad``: backwards whose gradients are thrown away belong to no
        update.
        """
        if self._judge.awaited.present is not None and self._state.idle:
            self._judge.awaited.settle()
        with self._state.untaped(), self._state.unwatched():
            original(owner, *args, **kwargs)
        if self._state.accounts.is_looking:
            self._state.account(self._state.accounts.wrote, user_line())
        if self._state.idle:
            self._empty_clips.emptied()
            self._state.window.forget_cleared()

    def unscale(self, original: Any, scaler: Any, optimizer: Optimizer) -> None:
        """Stand in for ``GradScaler.unscale_``: what it finds is the flag."""
        self._state.stop_expecting()
        self._state.ignore_writes()
        if self._state.idle and scaler.is_enabled():
            if self._judge.awaited.present is not None:
                self._judge.awaited.settle()
            self._take_asked(partial(held_by, optimizer))
            self._state.account(self._state.accounts.unscaling, optimizer)
            self._state.begin_sink()
        try:
            original(scaler, optimizer)
        except ValueError as error:  # of gradients in float16, which it refuses
            self._judge.refused(optimizer, error)
            raise
        if not self._state.idle or not scaler.is_enabled() or not self._state.window.micros:
            return
        self._state.window.scaler = scaler
        self._state.window.note("unscale")
        self._judge.came_to_another_sink()
        found = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
        if self._judge.judge(held_by(optimizer), None, optimizer, found).redone:
            scaler._per_optimizer_states.pop(id(optimizer))
            original(scaler, optimizer)
        self._state.mark_gradients()

    def scaler_step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kw: Any) -> Any:
        """Stand in for ``GradScaler.step``, which calls no optimizer when it found an Inf."""
        if not self._state.idle or not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kw)
        if self._judge.awaited.present is not None:
            self._judge.awaited.settle()
        self._state.stop_expecting()
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                self._state.begin_sink()
                self._state.window.scaler = scaler
                self._judge.judge(held_by(optimizer), norm_here(held_by(optimizer)), optimizer)
            else:
                scaler.unscale_(optimizer)
        self._in_scaler = True
        try:
            return original(scaler, optimizer, *args, **kw)
        finally:
            self._in_scaler = False
            self._judge.ended(optimizer)

    def before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Look at gradients that no earlier sink saw, and hold back a vetoed update.

        An optimizer's pre-hook.
        """
        if not self._state.idle:
            self._state.roots.update_inside()
            return None
        if self._open.updates and self._open.begins_inherited(optimizer):
            self._look_inside(optimizer)
            return None
        has_hooks = bool(optimizer._optimizer_step_pre_hooks)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        may_wait = closure is None and not has_hooks
        awaited = self._judge.awaited.present
        if awaited is not None:
            awaited = self._judge.awaited.of(optimizer, is_plain=may_wait and len(args) <= 2)
        if callable(closure):
            self._state.set_aside()
        else:
            self._take_asked(partial(held_by, optimizer))
            self._state.stop_expecting()
        self._state.ignore_writes()
        is_rewritten = self._state.begin_sink()
        update, outer = self._open.begin(optimizer)
        if callable(closure):
            return self._with_closure(update, closure, args, kwargs)
        if outer is not None and outer.failed is not None:
            return None
        held = held_by(optimizer)
        self._look_again(held, optimizer, is_rewritten=is_rewritten)
        window = self._state.window
        if self._judge.controller.session is None:
            self._judge.asked_first(user_line())
        awaited = awaited or self._judge_unseen(held, optimizer, may_wait=may_wait)
        if awaited is not None:
            update.awaited = awaited
            awaited.gated.begin()
        elif window.vetoed or self._judge.is_settled(optimizer):
            update.held.take(held)
            update.held.hold_step()
        if not (window.vetoed or window.failed):
            self._account(optimizer)
        if has_hooks:
            self._own_hooks.begin(optimizer)
            self._state.watch_writes()
        return None

    def _account(self, optimizer: Optimizer) -> None:
        """Note what an update that is made is made of."""
        if self._state.accounts.is_looking:
            self._state.account(self._state.accounts.updating, optimizer, user_line())
        self._judge.learned(clipping=self._empty_clips.updating(optimizer))

    def _look_again(
        self, held: Sequence[Tensor], optimizer: Optimizer, *, is_rewritten: bool
    ) -> None:
        """Have gradients judged once more that an earlier sink saw, where they are others now."""
        window = self._state.window
        if not self._in_scaler and window.let_go_of_scaler(held) and window.judged:
            self._judge.judge_again(held, norm_here(held), optimizer)
        elif is_rewritten:
            self._judge.judge_rewritten(held, optimizer)

    def _with_closure(
        self, update: OpenUpdate, closure: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return what an update is given, with what looks at its closure in the place of that."""
        self._closures.begin(update, may_leave_out=self._judge.may_leave_out)
        watched = partial(self._evaluate, closure, update)
        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, {**kwargs, "closure": watched}

    def _judge_unseen(
        self, held: Sequence[Tensor], optimizer: Optimizer, *, may_wait: bool
    ) -> Awaited | None:
        """Have the gradients of an optimizer judged that no earlier sink saw; return its update,
        with ``may_wait``, if they are to be judged when it was launched.
        """
        window, joint = self._state.window, self._judge.steps.joint
        if joint.are_any and not window.closed:  # else half of a bad update would be made
            held = [*held, *joint.held_beside(optimizer)]
        is_next = optimizer in window.rates_of and optimizer not in window.made_by
        if (is_next or not window.closed) and window.judged.issuperset(map(id, held)):
            return None
        unseen = [p for p in held if id(p) not in window.judged]
        if not ((window.closed and self._judge.controller.session) or gradients_held(unseen)):
            return None
        norm = norm_here(unseen)
        awaited = self._judge.awaited.unclipped(unseen, norm, optimizer) if may_wait else None
        if awaited is None:
            self._judge.judge(unseen, norm, optimizer)
        return awaited

    def after_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Put held back gradients where the script left them; an optimizer's post-hook."""
        if self._state.in_backward:
            self._state.updated_inside.append(optimizer)
        if not self._state.idle or (self._open.inherits and self._open.ends_inherited(optimizer)):
            return
        if optimizer._optimizer_step_pre_hooks:
            self._own_hooks.end(optimizer)
        update = self._open.end(optimizer)
        update.held.give_back()
        if update.awaited is not None:
            self._judge.awaited.landed(update.awaited, optimizer)
        outer = self._open.outer
        if self._in_scaler or (outer is not None and outer.failed is not None):
            return
        try:
            self._judge.updated(update)
        finally:
            self._closures.end(update)
            self._judge.ended(optimizer)
        self._state.watch_writes()  # to the weights, until the next forward

    def _look_inside(self, optimizer: Optimizer) -> None:
        """Look again, inside an update, at gradients that the script has written to in it."""
        self._state.ignore_writes()
        update = self._open.of(optimizer)
        if update is None or not self._state.idle or not self._state.look_for_writes():
            return
        self._judge.judge_rewritten(held := held_by(optimizer), optimizer)
        if self._state.window.vetoed:
            update.held.take(held)
            if not update.num_inside:
                update.held.hold_step()

    def _evaluate(
        self, closure: Callable[..., Any], update: OpenUpdate, *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for the closure of an update, and look at what it has made."""
        self._closures.evaluating(update)
        update.evaluates = True
        if torch.is_grad_enabled():
            self._state.expect_micro()
        try:
            result = closure(*args, **kwargs)
        finally:
            update.evaluates = False
        self._state.drop()
        window, parameters = self._state.window, held_by(update.optimizer)
        window.note("closure")
        # It may be evaluated for its value alone.
        if update.failed is None and (torch.is_grad_enabled() or not window.closed):
            result = self._judge.evaluation(update, norm_here(parameters), result)
        if window.vetoed:
            update.held.take(parameters)
        window.closed = True
        return result
