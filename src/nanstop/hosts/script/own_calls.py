"""Calls of a script's own around those that are recorded: a ``__call__`` around that of
``nn.Module``, a function that ``torch.compile`` has compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nanstop.hosts.compiled_functions import CompiledFunction
from nanstop.hosts.script.judge import Judge
from nanstop.hosts.script.state import LoopState
from nanstop.hosts.script.window import has_buffers, is_trainable
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


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
    """

    def __init__(self, state: LoopState, judge: Judge, one_call: Callable[..., Any]) -> None:
        self._state = state
        self._judge = judge
        self._one_call = one_call

    def call(self, function: CompiledFunction, args: Any, kwargs: Any) -> Any:
        """Return what the function returns."""
        if not self._state.idle:
            return function.compiled(*args, **kwargs)
        modules, others = function.reached()
        given = (one for one in (*args, *kwargs.values()) if isinstance(one, nn.Module))
        for module in (*modules, *given):
            self._note(module)
        try:
            with self._state.unwatched(), self._state.roots.paused():
                return self._one_call(function.compiled, args, kwargs, but=others)
        except Exception as error:
            self._judge.refusals.raised(error)
            raise

    def _note(self, module: nn.Module) -> None:
        """Note a model that is called in compiled code, where nobody sees it."""
        window = self._state.begin_window
        if torch.is_grad_enabled() and is_trainable(module):
            window().add(module, self._state.buffers)
        elif has_buffers(module):
            window().follow(module, self._state.buffers)
