"""The stack of torch's function modes, on which the script may have modes of its own.

Modes leave the stack by its top, whoever is there; nanstop's come and go wherever in it they are.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode, handle_torch_function

from nanstop.own_code import is_torchs
from nanstop.tracebacks import passes_through

__tracebackhide__ = passes_through


class FunctionMode(TorchFunctionMode):
    """What all function modes are here: ``handle`` is given each call as torch itself has begun
    it.

    To a mode, torch names a function by what stands under its name now. Where a script or a library
    has put a function of its own there (``F.cross_entropy`` times a weight), torch's own is running
    already, inside that one; called by the mode, that one would be applied twice.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is FunctionType and not is_torchs(func.__code__.co_filename):
            func = _begun(func)
        return self.handle(func, args, kwargs or {})

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a call, and return what the caller is to get."""
        return func(*args, **kwargs)


def _begun(named: FunctionType) -> Callable[..., Any]:
    """Return the function of torch that has named another to the mode that asks; that one, if it
    has asked itself.
    """
    frame = sys._getframe(2)  # of what calls a mode: torch's Python, or torch's C for its caller
    if frame.f_code is not handle_torch_function.__code__:
        name = next((name for name, held in vars(Tensor).items() if held is named), "")
        return getattr(torch._C.TensorBase, name, named)
    begun: Any = frame.f_back
    code, names = begun.f_code, begun.f_globals
    is_whole = is_torchs(code.co_filename) and not code.co_freevars
    return FunctionType(code, names) if is_whole else named


class OwnMode(FunctionMode):
    """A mode of nanstop's, in which the script's calls are what they are without it."""


class PassingMode(OwnMode):
    """A mode that comes and goes. ``lingers``: it could not be taken off, and is to do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = self.lingers = False

    def start(self) -> bool:
        """Put it on the stack, not where the script has a function mode of its own; return whether
        it is there.
        """
        if is_crowded():
            return False
        put_on(self)
        self.is_on = True
        return True

    def stop(self) -> bool:
        """Take it off the stack, wherever in it it is. Return whether it was there.

        Inside an op that raised it cannot be taken off: torch holds it and puts it back. It
        ``lingers`` then, and a later ``stop`` succeeds.
        """
        if not self.is_on:
            return False
        was_on = take_off(self)
        self.lingers = self.is_on = not was_on
        return was_on

    def stop_for_call(self) -> bool:
        """Stop it so as to have a call of its own; return whether it was on: not inside of one that
        it records just now (an operation of ``torch.library`` is a function of autograd's).
        """
        return self.is_on and is_on(self) and self.stop()


class _ThreadEnd:
    """Empties the stack of a thread that ends, while the interpreter still knows the thread.

    What torch holds for a thread it lets go of after Python has joined it; a Python object there
    needs the interpreter's lock once more, and a process that ends meanwhile is aborted
    ("terminate called without an active exception").
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        if threading.get_ident() != self._thread:  # a daemon, when the process ends
            return
        for mode in _modes():
            if isinstance(mode, OwnMode):
                take_off(mode)


_of_thread = threading.local()


def put_on(mode: OwnMode) -> None:
    """Put a mode on top of the stack of the calling thread."""
    _push_mode(mode)
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main and not hasattr(_of_thread, "end"):
        _of_thread.end = _ThreadEnd()


def take_off(mode: OwnMode) -> bool:
    """Take a mode off the stack, wherever in it it is. Return whether it was there.

    Inside a call that it handles it is not: torch holds it, and puts it back.
    """
    count = torch._C._len_torch_function_stack()
    if not count:
        return False
    if torch._C._get_function_stack_at(count - 1) is mode:
        _pop_mode()
        return True
    if not is_on(mode):
        return False
    above = []
    while (other := _pop_mode()) is not mode:
        above.append(other)
    for other in reversed(above):
        _push_mode(other)
    return True


def is_on(mode: OwnMode) -> bool:
    """Return whether a mode is on the stack, wherever in it it is."""
    return any(other is mode for other in _modes())


@contextmanager
def on_stack(mode: OwnMode) -> Iterator[None]:
    """Have a mode on the stack inside."""
    put_on(mode)
    try:
        yield
    finally:
        take_off(mode)


@contextmanager
def in_engine(mode: OwnMode) -> Iterator[None]:
    """Have a mode on the stack while autograd's engine runs inside: torch has taken it off for a
    call that it handles, and the engine's threads take over the stack as it is when they begin.
    """
    engine: Any = torch.autograd
    run = engine._engine_run_backward

    def run_with_mode(*args: Any, **kwargs: Any) -> Any:
        with on_stack(mode):
            return run(*args, **kwargs)

    engine._engine_run_backward = run_with_mode
    try:
        yield
    finally:
        engine._engine_run_backward = run


def is_crowded() -> bool:
    """Return whether a mode of the script's is on the stack, but that of ``set_default_device``,
    which stays where it is.
    """
    if not torch._C._len_torch_function_stack():
        return False
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return any(mode is not default and not isinstance(mode, OwnMode) for mode in _modes())


def _modes() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(place) for place in range(count)]
