"""Conditions that a step is run again under:
compiled code eagerly, no word and no warning again, nothing drawn at random.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import (
    AbstractContextManager,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from traceback import clear_frames, walk_tb
from typing import Any, TextIO, cast

import torch
import torch.utils.checkpoint
from torch import nn
from torch._C import _len_torch_dispatch_stack
from torch._C._functorch import peek_interpreter_stack
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from nanstop.replay.undo import attributes_kept

Under = Callable[[], AbstractContextManager[Any]]
"""Gives the context that a run is made in."""


def is_compiling() -> bool:
    """Return whether anything of this process was compiled: a hook would have it compiled again."""
    utils = sys.modules.get("torch._dynamo.utils")
    # A frame that is to be one graph (``fullgraph``) is not counted as a frame.
    return utils is not None and any(map(utils.counters.get, ("frames", "stats")))


def inside_transform() -> bool:
    """Return whether ``vmap``, ``grad`` or another transform is at work.

    Its tensors mean nothing outside of it.
    """
    return peek_interpreter_stack() is not None


@contextmanager
def eager() -> Iterator[None]:
    """Run compiled modules eagerly inside:
    a dispatch mode would disable their compiled code for the rest of the run.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    # The recorder's module hooks see a compiled module and its original:
    # both have the name of one place.
    with unwarned("Using `torch.compile"), torch.compiler.set_stance("force_eager"):
        yield


def unrecorded() -> AbstractContextManager[Any]:
    """Return a context that keeps what is computed inside from dispatch modes that are on outside:
    a recorder that notes the run's operations, a script's own counter. None is on as a rule.
    """
    num = _len_torch_dispatch_stack() + _len_torch_dispatch_stack_pre_dispatch()
    return _disable_current_modes() if num else nullcontext()


@contextmanager
def unwarned(message: str = "") -> Iterator[None]:
    """Have no warnings inside whose text begins with ``message``, errors of ``-W error`` neither.

    Python is not told that its filters have changed: it would forget which warnings it has shown,
    and show each of them again (https://github.com/python/cpython/issues/73858).
    """
    filters = cast("list[Any]", warnings.filters)
    mine = ("ignore", re.compile(message), Warning, None, 0)
    filters.insert(0, mine)
    try:
        yield
    finally:
        filters.remove(mine)


@contextmanager
def unheard() -> Iterator[None]:
    """Show no warnings inside: what a repetition of a step warns of has been said by its first run.

    Filters stay as they are: ``warnings.catch_warnings`` would make Python forget which warnings
    were shown before (https://github.com/python/cpython/issues/73858), so that the run would show
    each of them again.
    """

    def ignore(*args: Any, **kwargs: Any) -> None:
        pass

    with attributes_kept([(warnings, "showwarning")]):
        warnings.showwarning = ignore
        yield


@contextmanager
def unspoken() -> Iterator[None]:
    """Drop what this thread prints and what loggers say inside; other threads print on."""
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        out, err = (cast("TextIO", _Muted(stream)) for stream in (sys.stdout, sys.stderr))
        with redirect_stdout(out), redirect_stderr(err):
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def frames_ended() -> Iterator[None]:
    """End the frames of what raises inside with the exception, and what they had begun: see
    ``end_checkpoints``. Nobody looks into a run that is made again; an exception that is being
    handled outside is the script's, which may.
    """
    outside = sys.exc_info()[1]
    try:
        yield
    except BaseException as error:
        for one in (error, error.__cause__, error.__context__):
            if one is not None and one is not outside:
                clear_frames(one.__traceback__)
        raise


def end_checkpoints(error: BaseException) -> None:
    """End the checkpointed functions that an exception came through.

    In torch 2.6 to 2.11 (2.13 ends it itself) such a function leaves its checkpoint's hooks on
    saved tensors on until a generator is collected that the traceback keeps, on whichever thread
    that is: meanwhile, or for
    good, all that runs is saved and computed as a part of it (``torch.utils.checkpoint.checkpoint``
    without reentrance, https://github.com/pytorch/pytorch/blob/v2.11.0/torch/utils/checkpoint.py).
    """
    file = torch.utils.checkpoint.__file__
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code.co_filename == file:
            with suppress(RuntimeError):  # it is still running
                frame.clear()


class _Muted:
    """A stream that this thread's words do not reach; else it is the stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        is_muted = threading.get_ident() == self._thread
        return len(text) if is_muted else self._stream.write(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


@contextmanager
def forward_only() -> Iterator[None]:
    """Leave out the backward inside; gradients that code asks for (``torch.autograd.grad``) come.

    Raises ``SecondBackwardError`` where another one begins: what comes between two may hang on the
    gradients of the first.
    """
    num = 0

    def backward(*_args: Any, **_kwargs: Any) -> None:
        nonlocal num
        num += 1
        if num > 1:
            raise SecondBackwardError

    with attributes_kept([(torch.autograd, "backward")]):
        torch.autograd.backward = backward  # ``Tensor.backward`` calls it
        yield


@contextmanager
def filled_memory(*, filled: bool = True) -> Iterator[None]:
    """Have memory that is taken inside, and not written yet, hold NaN (of integers, the largest
    number): what is read of it is then seen. ``filled=False``: have it hold what was left there.

    Compiled code, which takes memory by itself, runs eagerly; kernels that torch knows to be
    deterministic take the place of others where there are any.
    """
    deterministic: Any = torch.utils.deterministic
    fill = deterministic.fill_uninitialized_memory
    on = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with eager(), unwarned():
            if filled:
                torch.use_deterministic_algorithms(True, warn_only=True)
            deterministic.fill_uninitialized_memory = filled
            yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warn)
        deterministic.fill_uninitialized_memory = fill


class SecondBackwardError(Exception):
    """A run in ``forward_only`` has come to its second backward."""


@contextmanager
def without_dropout(root: nn.Module) -> Iterator[None]:
    """Have nothing dropped or jittered at random inside:
    formats draw differently, and gaps would be the draws'.

    Leaves ``training`` as it is, which gradient checkpointing depends on.
    """
    places = [
        (module, name)
        for module in root.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and value > 0.0 and _is_chance(module, name)
    ]
    with attributes_kept(places):
        for module, name in places:
            setattr(module, name, 0.0)
        yield


def _is_chance(module: nn.Module, name: str) -> bool:
    """Return whether an attribute is a probability to drop, or by how much a router's input is
    jittered. Told by names: models have their own classes for it, and no value tells a probability
    from any other number below 1.
    """
    if name == "p":
        return "dropout" in type(module).__name__.lower()
    return "drop" in name or "jitter" in name
