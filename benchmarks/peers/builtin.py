"""Peers that torch and transformers bring, or that are twenty lines long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from births import is_finite
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peers.alarm import Alarm, Raise
from peers.clock import Clock, knowing_modules

BACKWARD = {
    "mm": ("mm.default",),
    "addmm": ("mm.default",),
    "bmm": ("bmm.default",),
    "mul": ("mul.Tensor",),
    "div": ("div.Tensor", "mul.Tensor"),
    "pow": ("mul.Tensor", "pow.Tensor_Scalar"),
    "sqrt": ("div.Tensor",),
    "log": ("div.Tensor",),
    "exp": ("mul.Tensor",),
    "norm": ("div.Tensor", "mul.Tensor"),
    "linalg_vector_norm": ("div.Tensor", "mul.Tensor"),
}
"""Operators that some autograd nodes call:
the node is named, and it may be meant by any of them.
"""
_NODE = re.compile(r"Function '(\w+?)(Backward\d*)' returned nan values")


@contextmanager
def nothing(clock: Clock, alarm: Raise) -> Iterator[None]:
    """No peer: what the others are compared with."""
    yield


@contextmanager
def detect_anomaly(clock: Clock, alarm: Raise) -> Iterator[None]:
    """``torch.autograd.set_detect_anomaly(True)``: raises at the first backward node that
    returns NaN.
    """
    torch.autograd.set_detect_anomaly(True)
    try:
        yield
    except RuntimeError as error:
        found = _NODE.search(str(error))
        if found:
            name = re.sub(r"(?<!^)(?=[A-Z])", "_", found[1]).lower()
            ops = (
                f"aten.{name}_backward.default",
                f"aten._{name}_backward_data.default",
                *(f"aten.{one}" for one in BACKWARD.get(name, ())),
            )
            alarm(Alarm(clock.step, clock.micro, "backward", ops, said=str(error)))
        raise


@contextmanager
def debug_underflow_overflow(clock: Clock, alarm: Raise) -> Iterator[None]:
    """Transformers' ``DebugUnderflowOverflow`` on each model, from its first call on."""
    from transformers.debug_utils import DebugUnderflowOverflow

    class Reporting(DebugUnderflowOverflow):
        def dump_saved_frames(self) -> None:
            head = re.search(r"^\s{17} (\S*) \w+$", self.frames[-1], re.MULTILINE)
            where = (head[1],) if head else ()
            said = self.frames[-1]
            alarm(Alarm(clock.step, clock.micro, clock.phase, modules=where, said=said))
            super().dump_saved_frames()

    watched: set[int] = set()
    reporting: list[Any] = []

    def begin(module: nn.Module, _: Any) -> None:
        if id(module) not in watched and any(True for _ in module.parameters()):
            watched.update(map(id, module.modules()))
            reporting.append(Reporting(module))

    handle = nn.modules.module.register_module_forward_pre_hook(begin)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def isfinite_hooks(clock: Clock, alarm: Raise) -> Iterator[None]:
    """A hook on every module that looks at what it returns, forward and backward."""

    def look(module: nn.Module, _: Any, output: Any) -> None:
        if not all(map(is_finite, tree_leaves(output))):
            where = (clock.names.get(id(module), ""),)
            alarm(Alarm(clock.step, clock.micro, clock.phase, modules=where))

    forward = nn.modules.module.register_module_forward_hook(look)
    backward = nn.modules.module.register_module_full_backward_hook(look)
    try:
        with knowing_modules(clock):
            yield
    finally:
        forward.remove()
        backward.remove()


class _FirstBad(TorchDispatchMode):
    def __init__(self, clock: Clock, alarm: Raise) -> None:
        super().__init__()
        self.clock, self.alarm = clock, alarm

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not all(map(is_finite, tree_leaves(out))):
            clock = self.clock
            where = clock.stack[-1] if clock.stack else ""
            self.alarm(Alarm(clock.step, clock.micro, clock.phase, (str(func),), (where,)))
        return out


@contextmanager
def naive_dispatch(clock: Clock, alarm: Raise) -> Iterator[None]:
    """The first operation of a training step whose output is not finite."""
    mode = _FirstBad(clock, alarm)
    entered = []

    def begin(module: nn.Module, _: Any) -> None:
        if not entered:
            entered.append(mode.__enter__())

    handle = nn.modules.module.register_module_forward_pre_hook(begin)
    try:
        with knowing_modules(clock):
            yield
    finally:
        handle.remove()
        if entered:
            mode.__exit__(None, None, None)
