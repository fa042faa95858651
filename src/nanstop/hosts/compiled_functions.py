"""Functions that a script has compiled, called so that their code sees nothing of nanstop's."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from nanstop.replay.script_objects import reached
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through

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
        self._is_known = False

    def reached(self) -> tuple[list[nn.Module], list[Tensor]]:
        """Return the modules and the other tensors that the script's code in it reads beside its
        arguments, as it was found to once; anew where one of them is gone. No device work.
        """
        if self._is_known:
            modules = [one for held in self._modules if (one := held()) is not None]
            others = [one for held in self._others if (one := held()) is not None]
            if len(modules) == len(self._modules) and len(others) == len(self._others):
                return modules, others
        modules, others = reached(self._given)
        self._modules, self._others = [*map(ref, modules)], [*map(ref, others)]
        self._is_known = True
        return modules, others


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
