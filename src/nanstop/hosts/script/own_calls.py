"""Calls of a script's own around those that are recorded: a ``__call__`` around that of
``nn.Module``, a function that ``torch.compile`` has compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.hosts.compiled_functions import CompiledFunction
from nanstop.hosts.script.judge import Judge
from nanstop.hosts.script.sinks import Sinks
from nanstop.hosts.script.state import LoopState
from nanstop.hosts.script.window import has_buffers, is_trainable
from nanstop.numerics.tensors import version
from nanstop.numerics.trained import gradients_held, held_by
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


def _marks(optimizer: Optimizer) -> tuple[list[int], list[tuple[int, int]]]:
    """Return what differs once the weights of an optimizer were written, and their gradients."""
    held = held_by(optimizer)
    gradients = [(id(one), version(one)) for one in gradients_held(held)]
    return list(map(version, held)), gradients


class InnerCall:
    """Calls a module as ``call``, that of ``nn.Module``, does: what a ``__call__`` of its class
    does before that was done once, and is not to be done again.

    ``forward``: the module's, which names the arguments.
    """

    def __init__(self, call: Callable[..., Any], module: nn.Module) -> None:
        self._call, self._module = call, module
        self.forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._module, *args, **kwargs)


def calls_itself(kind: type) -> bool:
    """Return whether instances of a class are called by a ``__call__`` before ``nn.Module``'s."""
    found = next((one for one in kind.__mro__ if "__call__" in vars(one)), nn.Module)
    return found is not nn.Module


class CompiledCalls:
    """Calls what ``torch.compile`` has made of a function, as one operation of the loss
    (``one_call``): its code must see no mode, and no ``__call__`` of modules but torch's own.
    ``sinks`` are told of one that makes an optimizer's update, whose hooks compiled code does not
    call.
    """

    def __init__(
        self,
        state: LoopState,
        judge: Judge,
        one_call: Callable[..., Any],
        sinks: Sinks,
    ) -> None:
        self._state = state
        self._judge = judge
        self._one_call = one_call
        self._sinks = sinks

    def call(self, function: CompiledFunction, args: Any, kwargs: Any) -> Any:
        """Return what the function returns."""
        if not self._state.idle:
            return function.compiled(*args, **kwargs)
        modules, others = function.reached()
        given = (one for one in (*args, *kwargs.values()) if isinstance(one, nn.Module))
        for module in (*modules, *given):
            self._note(module)
        run = partial(self._run, function.compiled, args, kwargs, others)
        # Of a step that is compiled as a whole no backward was seen.
        optimizer = function.updates() if self._state.window.micros else None
        if optimizer is None or args or kwargs:  # which may say that none is to be made
            return run()
        return self._updating(function, optimizer, run)

    def _run(self, compiled: Any, args: Any, kwargs: Any, others: Sequence[Tensor]) -> Any:
        try:
            with self._state.unwatched(), self._state.roots.paused():
                return self._one_call(compiled, args, kwargs, but=others)
        except Exception as error:
            self._judge.refusals.raised(error)
            raise

    def _updating(
        self, function: CompiledFunction, optimizer: Optimizer, run: Callable[[], Any]
    ) -> Any:
        """Call what may make an update; whether it has is known by the weights. Gradients of one
        that is left out are not given back where its code may have cleared them.
        """
        held = self._sinks.compiled_update(optimizer)
        weights, gradients = _marks(optimizer)
        is_left_out = held.is_any
        try:
            # What is not to be called is not to be compiled either.
            return None if held.holds_step else run()
        finally:
            now = _marks(optimizer)
            moved = now[0] != weights
            if not is_left_out:
                function.called(has_updated=moved, changes_gradients=now[1] != gradients)
            elif function.changes_gradients:
                held.forget()
            self._sinks.compiled_updated(optimizer, was_made=moved or is_left_out)

    def _note(self, module: nn.Module) -> None:
        """Note a model that is called in compiled code, where nobody sees it."""
        window = self._state.begin_window
        if torch.is_grad_enabled() and is_trainable(module):
            window().add(module, self._state.buffers)
        elif has_buffers(module):
            window().follow(module, self._state.buffers)
