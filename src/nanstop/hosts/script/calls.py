"""Model calls, ops and backwards of an unchanged loop, collected into the micro-batches of a
window.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from nanstop.errors import TrainingStopped
from nanstop.hosts.loop.micro import UnseenMicro
from nanstop.hosts.patch_table import Table
from nanstop.hosts.script.asks import Asks
from nanstop.hosts.script.judge import Judge
from nanstop.hosts.script.own_calls import InnerCall, calls_itself
from nanstop.hosts.script.state import LoopState
from nanstop.hosts.script.steps import NO_MODEL
from nanstop.hosts.script.window import (
    ScriptWindow,
    device_of,
    has_buffers,
    has_parameters,
    is_trainable,
    on_one_rank,
)
from nanstop.hosts.sharded.engine import engine_class, scaling_class
from nanstop.hosts.tape.given.weights import given_weights
from nanstop.hosts.tape.tape import Tape
from nanstop.hosts.tape.tape_calls import TapedCall
from nanstop.hosts.tape.taped_micro import TapedMicro
from nanstop.hosts.tape.tensors import total
from nanstop.numerics.tensors import by_torch_alone, tensors, version
from nanstop.own_code import is_class_of
from nanstop.replay.rng import drawn
from nanstop.tracebacks import passes_through
from nanstop.tracing.places import user_line

__tracebackhide__ = passes_through

_NOT_TAPED = "the loss is computed outside the model, which is recorded from now on"


class Calls:
    """Stands in for the functions of torch by which a loop makes gradients."""

    def __init__(self, state: LoopState, judge: Judge, table: Table) -> None:
        self._state = state
        self._judge = judge
        self._table = table
        self._scaled: tuple[Any, Tensor] | None = None
        self.asks = Asks(state, judge, tape_ops=self._tape_ops, unseen=self._unseen)
        state.roots.stand_in = self.discover

    def install(self) -> None:
        """Replace torch's functions in the table."""
        self._table.replace(torch.amp.GradScaler, "scale", self.scale)
        self._table.replace(nn.Module, "eval", self.put_in_eval)
        self._table.replace(torch.autograd.Function, "apply", self.apply_function)
        self._table.replace(torch, "from_numpy", self.bring_in)
        self._table.replace(torch.jit, "trace", self.trace)
        self._table.replace(torch.nn.utils.stateless, "_functional_call", self.call_with)
        self._state.roots.begin()
        forked = WeakMethod(self._state.leave)
        # A worker of a data loader inherits the stack of function modes.
        os.register_at_fork(after_in_child=lambda: (drop := forked()) and drop())

    def imported(self) -> None:
        """Stand in for what makes gradients in an engine that has been imported by now."""
        kind, scaling = engine_class(), scaling_class()
        if kind is not None:
            self._table.replace(kind, "backward", self.engine_backward)
        if scaling is not None and hasattr(scaling, "scale_if_loss"):
            self._table.replace(scaling, "scale_if_loss", self.scale_in_engine)

    # ---- model calls

    def discover(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``nn.Module.__call__`` until the first update.

        A trainable module called by the loop is a root.
        """
        watched = self._state.idle or self._state.takes_over(module)
        if id(module) in self._state.roots.loops:
            return original(module, *args, **kwargs)
        if watched and torch.is_grad_enabled() and is_trainable(module):
            self._state.claim()
            is_within = calls_itself(type(module))
            self._table.replace(type(module), "__call__", self.call)
            if not is_within:
                return self.call(original, module, *args, **kwargs)
            again = InnerCall(original, on_one_rank(module))
            return self._called(partial(original, module), module, args, kwargs, again=again)
        if watched and torch.is_grad_enabled() and has_buffers(module):
            self._state.begin_window().follow(module, self._state.buffers)
        if watched and not torch.is_grad_enabled():
            with self._state.untaped() as tape:
                self._follow_aside(tape, module)
                return _aside(tape, module, partial(original, module), args, kwargs)
        return original(module, *args, **kwargs)

    def _follow_aside(self, tape: Tape | None, module: nn.Module) -> None:
        """Have what the loop calls without a graph seen past the first update too; not torch's own
        classes, which are parts of models that may be compiled.
        """
        own = not is_class_of(type(module), "torch")
        if tape is not None and own and has_parameters(module):
            self._table.replace(type(module), "__call__", self.call)

    def call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Stand in for a root class's ``__call__``."""
        if not self._state.idle and not self._state.takes_over(module):
            return original(module, *args, **kwargs)
        if self._state.roots.loops and id(module) in self._state.roots.loops:
            return original(module, *args, **kwargs)
        again = on_one_rank(module)
        return self._called(partial(original, module), module, args, kwargs, again=again)

    def trace(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``torch.jit.trace``: a trace calls its values what the frames around them
        do, and compares two.
        """
        with self._state.pause(), self._state.untaped(), self._state.unwatched():
            return original(*args, **kwargs)

    def call_with(self, original: Any, module: Any, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for what every ``functional_call`` comes to."""
        if not self._state.idle or not is_trainable(module):
            return original(module, given, *args, **kwargs)
        call, inputs, keywords = given_weights(original, module, given, *args, **kwargs)
        again = call.of(on_one_rank(module))
        try:
            return self._called(call, module, inputs, keywords, again=again)
        finally:
            if self._state.micro is not None:
                self._state.micro.gives_weights = True

    def _called(self, function: Any, module: Any, args: Any, kwargs: Any, *, again: Any) -> Any:
        """Return what a model call of the loop returns; ``again`` is what a replay calls for it."""
        self._state.ignore_writes()
        self._state.account(self._state.accounts.forward)
        if not torch.is_grad_enabled():
            self._judge.steps.called_without_graph(module, user_line())
            with self._state.untaped() as tape:
                if self._state.micro is None and isinstance(again, nn.Module):
                    self._state.evaluations.note(again, args, kwargs)
                return _aside(tape, module, function, args, kwargs, again=again)
        self._state.claim()
        micro = self._begun(module)
        if micro is None:
            return function(*args, **kwargs)
        micro.tape.stop()
        rng = self._state.rng.note() if micro.tape.has_model else micro.rng
        num_inside = self._state.roots.num_inside
        try:
            with self._state.pause(), self._state.roots.paused():
                result = micro.tape.call(function, args, kwargs, recorded=again, rng=rng)
        except Exception as error:
            self._judge.refusals.raised(error)
            raise
        if self._state.roots.num_inside != num_inside and not _has_graph(result):
            self._leave_to_its_loop(module)
            return result
        self._tape_ops(micro)
        self._state.watch_writes()
        return result

    def _leave_to_its_loop(self, module: nn.Module) -> None:
        """Record nothing of a call that made updates and has left nothing to go back from: it is a
        loop of its own, whose models are the roots from the next call on.
        """
        self._state.drop()
        if not self._state.window.micros:
            self._state.window = ScriptWindow(closed=True)
        self._state.roots.hold_loop(module)

    def _begun(self, module: nn.Module) -> TapedMicro | None:
        """Return the micro-batch that a model call belongs to.

        None for a module that holds no parameter.
        """
        if self._judge.awaited.present is not None:
            self._judge.awaited.settle()
        try:
            with by_torch_alone():
                if not has_parameters(module):
                    return None
                is_there = device_of(module) != "meta"
            if is_there:
                self._judge.left_out.look()  # runs the script's code again, as it was run
                with by_torch_alone():
                    self._judge.controller.look_at_hooks(module)
                    return self._state.begin(module)
            self._state.not_watching("a model on `meta` has no values")
            return None
        except TrainingStopped:
            raise
        except Exception as error:  # nanstop is never the reason a run dies
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        self._state.not_watching(f"{type(error).__name__}: {error}")

    def _tape_ops(self, micro: TapedMicro) -> None:
        if not self._state.met_failure and not self._state.budget.is_cheap:
            micro.reason = _NOT_TAPED
        elif not micro.tape.start():
            micro.reason = "the script has a torch function mode of its own"

    def put_in_eval(self, original: Any, module: Any) -> Any:
        """Stand in for ``nn.Module.eval``: a validation may leave the model so."""
        if self._state.idle:
            self._judge.awaited.settle()
            self._judge.steps.put_into_eval(module, user_line())
        return original(module)

    # ---- losses

    def apply_function(self, original: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``autograd.Function.apply``, which no function mode sees.

        A tape gets it as one call.
        """
        micro = self._state.micro
        if not self._state.idle or micro is None or not micro.tape.stop_for_call():
            return original(kind, *args, **kwargs)
        try:
            with self._state.pause():
                return micro.tape.call(original, (kind, *args), kwargs)
        except Exception as error:
            self._judge.refusals.raised(error)
            raise
        finally:
            if micro is self._state.micro:
                micro.tape.start()

    def bring_in(self, original: Any, array: Any) -> Any:
        """Stand in for ``torch.from_numpy``, which no function mode sees.

        A tape gets it as one call where the loss makes it of what NumPy has computed.
        """
        micro = self._state.micro
        if not self._state.idle or micro is None or not micro.tape.stop_for_call():
            return original(array)
        try:
            return micro.tape.call(original, (array,), {})
        finally:
            micro.tape.start()

    def scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        """Stand in for ``GradScaler.scale``: keeps the loss as it was before it."""
        micro = self._state.micro
        wanted = self._state.idle and scaler.is_enabled() and isinstance(outputs, Tensor)
        if not wanted or micro is None:
            return original(scaler, outputs)
        self._state.window.scaler = scaler
        self._state.accounts.scaled(scaler)
        with self._state.untaped(), self._state.pause():
            scaled = micro.tape.call(partial(original, scaler), (outputs,), {})
        self._scaled = ref(scaled), outputs
        return scaled

    def scale_in_engine(self, original: Any, optimizer: Any, loss: Any) -> Any:
        """Stand in for what multiplies a loss by the scale of an engine: keeps it as it was."""
        scaled = original(optimizer, loss)
        is_other = isinstance(scaled, Tensor) and scaled is not loss
        if is_other and self._state.idle and self._state.micro is not None:
            self._scaled = ref(scaled), loss
        return scaled

    def engine_backward(self, original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``backward`` of DeepSpeed's engine, in which it takes up the gradients."""
        result = original(engine, *args, **kwargs)
        if self._state.idle:
            self._state.mark_gradients()
        return result

    def backward(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``Tensor.backward`` and ``torch.autograd.backward``: closes a
        micro-batch.
        """
        if not self._state.idle:
            return original(loss, *args, **kwargs)
        if self._judge.awaited.present is not None:
            self._judge.awaited.settle()
        accounts = self._state.accounts
        self._state.ignore_writes()
        self._state.look_for_writes()
        losses = tensors(loss)
        if self._state.by_hand:
            self._judge.account_by_hand(losses)
        self._state.account(accounts.before_backward, losses)
        try:
            result = self._backward(original, loss, *args, **kwargs)
        except BaseException:
            accounts.drop()
            raise
        self._state.num_backwards += 1
        self._state.mark_gradients()
        if accounts.is_looking:
            self._state.account(accounts.after_backward, user_line())
        self._state.watch_writes()
        return result

    def _backward(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        raw = tensors(self._unscaled(loss))
        self._judge.left_out.look_at_replaced(raw)
        micro = self._state.micro or self._state.begin_without_model(raw)
        if micro is None or self._state.window.closed:
            self._state.drop()
            self._unseen(raw)
            with self._state.inside_backward():
                result = original(loss, *args, **kwargs)
            self._look_for_updates()
            if self._state.by_hand:
                self._judge.by_hand(())
            return result
        self._state.budget.recorded(micro.tape)
        micro.tape.stop()
        if self._state.roots.goes_on and self._state.window.scaler is None:
            self._state.window.note_scale(raw)
        try:
            with self._state.inside_backward():
                result = micro.tape.call(original, (loss, *args), kwargs, keep=True)
        except Exception as error:
            self._judge.refusals.raised(error)
            raise
        self._close(micro, raw)
        if micro.reduced:
            self._judge.exchanged()
        self._judge.refusals.came_back(micro)
        self._look_for_updates()
        if self._state.by_hand:
            self._judge.by_hand(micro.trained())
        elif kwargs.get("retain_graph") or (len(args) > 1 and args[1]):
            self._tape_ops(micro)
        else:
            self._state.drop()
            self._state.expect_micro()
        return result

    def _look_for_updates(self) -> None:
        if self._state.updated_inside:
            self._judge.updated_inside(self._state.updated_inside)
            self._state.updated_inside.clear()

    def _close(self, micro: TapedMicro, raw: list[Tensor]) -> None:
        try:
            micro.closed(raw)
            if not any(m is micro for m in self._state.window.micros):
                self._state.keep(micro)
        except Exception as error:  # losses of several devices, say
            self._give_up(error)

    def _unscaled(self, loss: Any) -> Any:
        known, self._scaled = self._scaled, None
        return known[1] if known is not None and known[0]() is loss else loss

    def _unseen(self, raw: list[Tensor]) -> None:
        self._state.roots.begin()
        self._state.begin_window()
        self._state.keep(UnseenMicro(NO_MODEL, total(raw)))


def _aside(
    tape: Tape | None, module: nn.Module, function: Any, args: Any, kwargs: Any, again: Any = None
) -> Any:
    """Return what a model that is called without a graph returns: for a loss, it may be, and so
    a call of the tape.
    """
    if tape is None:
        return function(*args, **kwargs)
    recorded = module if again is None else again
    trains = any(part.training for part in module.modules())
    is_alike = _comes_out_alike(module) if trains else None
    return tape.call(function, args, kwargs, recorded=recorded, always=False, is_alike=is_alike)


def _has_graph(result: Any) -> bool:
    return any(one.requires_grad for one in tensors(result))


def _comes_out_alike(module: nn.Module) -> Callable[[TapedCall], bool]:
    """Return what tells, after a call of a module in training, whether another one has the same
    result: this one drew nothing and moved no running statistics, which nobody puts back.
    """
    before = _drawn_and_moved(module)
    return lambda _: _drawn_and_moved(module) == before


def _drawn_and_moved(module: nn.Module) -> tuple[list[bytes], list[int]]:
    return drawn(), [version(b) for b in module.buffers()]
