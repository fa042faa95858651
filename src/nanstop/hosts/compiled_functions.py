"""Functions that a script has compiled, called so that their code sees nothing of nanstop's."""

from __future__ import annotations

from collections.abc import Callable
from dis import get_instructions
from functools import wraps
from inspect import unwrap
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.replay.script_objects import reached
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_KERNELS = ("bitsandbytes", "deepspeed")
"""Compile kernels of their own operations when they are imported;
inside one operation no tape is seen.
"""


def is_function(given: Any, compiled: Any) -> bool:
    """Return whether ``torch.compile`` has made a compiled function of what it was given: neither
    of a module or its call, nor of a kernel. Where compiling is off it gives back what it got.
    """
    owner = given.__self__ if getattr(given, "__name__", "") == "_call_impl" else given
    if compiled is given or isinstance(owner, nn.Module | None):
        return False
    return (getattr(given, "__module__", None) or "").partition(".")[0] not in _KERNELS


class CompiledFunction:
    """What ``torch.compile`` has made of a function of the script; called, it is that."""

    def __init__(self, given: Any, compiled: Callable[..., Any]) -> None:
        self._given = given
        self.compiled = compiled
        self._modules: list[ref[nn.Module]] = []
        self._others: list[ref[Tensor]] = []
        self._optimizers: list[ref[Optimizer]] = []
        self._is_known = False
        self._may_update: bool | None = None
        self.changes_gradients = True
        """Whether an update that a call of it makes may change them as well, until one was seen."""

    def reached(self) -> tuple[list[nn.Module], list[Tensor]]:
        """Return the modules and the other tensors that the script's code in it reads beside its
        arguments, as it was found to once; anew where one of them is gone. No device work.
        """
        if self._is_known:
            modules = [one for held in self._modules if (one := held()) is not None]
            others = [one for held in self._others if (one := held()) is not None]
            if len(modules) == len(self._modules) and len(others) == len(self._others):
                return modules, others
        modules, others, optimizers = reached(self._given)
        self._modules, self._others = [*map(ref, modules)], [*map(ref, others)]
        self._optimizers = [*map(ref, optimizers)]
        self._is_known = True
        return modules, others

    def updates(self) -> Optimizer | None:
        """Return the optimizer whose update a call of it makes: the only one that it reads, where
        it is its step or calls a step of something, unless a call has made none.
        """
        if self._may_update is False:
            return None
        self.reached()
        found = [one for held in self._optimizers if (one := held()) is not None]
        if self._may_update is None:
            self._may_update = len(found) == 1 and _may_update(self._given, found[0])
        return found[0] if self._may_update and found else None

    def called(self, *, has_updated: bool, changes_gradients: bool) -> None:
        """Note what a call has done to the weights of the optimizer and to their gradients."""
        self._may_update, self.changes_gradients = has_updated, changes_gradients


def _may_update(given: Any, optimizer: Optimizer) -> bool:
    """Return whether a function is the step of an optimizer, or calls a step of something."""
    function = unwrap(given)
    code = getattr(function, "__code__", None)
    loaded = get_instructions(code) if code is not None else ()
    calls = any(one.argval == "step" and one.opname in _ATTRIBUTES for one in loaded)
    return calls or function is unwrap(type(optimizer).step)


def unseen_by_tapes(given: Any, compiled: Any, loops: Callable[[], Any]) -> Any:
    """Return a function that calls a compiled one as the ``loops`` of this process have it called
    (``hosts.script.raw_loops.RawLoops``), by itself where there are none.
    """
    function = CompiledFunction(given, compiled)

    @wraps(compiled)
    def called(*args: Any, **kwargs: Any) -> Any:
        watched = None if torch.compiler.is_compiling() else loops()
        if watched is None:
            return compiled(*args, **kwargs)
        return watched.call_compiled(function, args, kwargs)

    return called
