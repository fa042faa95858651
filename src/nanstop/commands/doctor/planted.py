"""What audits of trainers and of loops share.

Planted failures, guards taken away, and what there is to observe.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.commands.doctor.result import Injected
from nanstop.hosts.patch_table import Table
from nanstop.numerics.graph import nodes_behind
from nanstop.numerics.tensors import in_float64
from nanstop.numerics.trained import held_by
from nanstop.own_code import is_library, lies_in
from nanstop.replay.function_modes import FunctionMode

LOSSES: Mapping[Injected, float] = {"nan_loss": float("nan"), "inf_loss": float("inf")}
"""The value that a loss gets."""

_HUGE = {torch.float16: 6e4, torch.float64: 1e300}
"""Finite in its format, but the norm of several such elements is not;
1e30 serves float32 and bfloat16.
"""

_READERS = frozenset(
    [
        "item",
        "tolist",
        "__bool__",
        "__float__",
        "isfinite",
        "isnan",
        "isinf",
        "isreal",
        "allclose",
        "equal",
        "gt",
        "lt",
        "ge",
        "le",
        "eq",
        "ne",
        "__gt__",
        "__lt__",
        "__ge__",
        "__le__",
        "__eq__",
        "__ne__",
    ]
)
_MENDERS = frozenset(("nan_to_num", "nan_to_num_"))


class PoisonedLoss(torch.autograd.Function):
    """A loss of ``value``, whose backward multiplies by it: what a failed forward leaves behind."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: float) -> Tensor:
        ctx.value = value
        return torch.full_like(loss, value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.value, None


def poisoned_gradient(gradient: Tensor, injected: Injected) -> Tensor:
    """Return a copy with one bad element, or with finite elements whose norm overflows."""
    poisoned = gradient.clone()
    if injected == "norm_overflow":
        return poisoned.fill_(_HUGE.get(gradient.dtype, 1e30))
    poisoned.view(-1)[0] = float("nan" if injected == "nan_gradient" else "inf")
    return poisoned


def descends(loss: Tensor, ancestor: Tensor) -> bool:
    """Return whether the gradient of ``loss`` flows through ``ancestor``."""
    return any(node is ancestor.grad_fn for node in nodes_behind([loss]))


def num_bad(tensors: Iterable[Tensor]) -> int:
    """Return how many elements are not finite. Synchronises the device."""
    floats = (t for t in tensors if t.is_floating_point())
    return sum(int(t.numel() - t.isfinite().sum()) for t in floats)


def num_zero(tensors: Iterable[Tensor]) -> int:
    """Return how many elements are zero. Synchronises the device."""
    return sum(int(t.numel() - t.count_nonzero()) for t in tensors)


def distance(parameters: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> float:
    """Return how far the finite elements have gone at most. Synchronises the device."""
    far = 0.0
    for name, parameter in parameters.items():
        now = in_float64(parameter.detach())
        gone = (now - in_float64(before[name]).to(now.device)).abs()
        gone = gone[gone.isfinite()]
        far = max(far, float(gone.max()) if gone.numel() else 0.0)
    return far


def state_tensors(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return every tensor of the optimizers' states."""
    entries = (entry for one in optimizers for entry in one.state.values())
    return [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients that an update would read."""
    gradients = (p.grad for p in held_by(optimizer) if p.grad is not None)
    return [one._values() if one.is_sparse else one for one in gradients]


def target_among(parameters: Iterable[Tensor]) -> Tensor | None:
    """Return the first parameter of several elements whose dense gradient is not zero, None for
    none. Synchronises the device.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None or gradient.is_sparse or parameter.numel() == 1:
            continue
        if bool(gradient.any()):
            return parameter
    return None


@contextmanager
def scaler_without_check() -> Iterator[None]:
    """Have loss scalers find nothing bad: they scale, and leave no update out.

    Fused optimizers ask them too.
    """
    table = Table()

    def found(original: Any, *args: Any) -> Any:
        return {device: torch.zeros_like(flag) for device, flag in original(*args).items()}

    def checked(original: Any, scaler: Any, optimizer: Any) -> Any:
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = clean = found(original, scaler, optimizer)
        return clean

    table.replace(torch.amp.GradScaler, "_unscale_grads_", found)
    table.replace(torch.amp.GradScaler, "_check_inf_per_device", checked)
    try:
        yield
    finally:
        table.undo()


@contextmanager
def clipping(removed: bool, seen: list[float]) -> Iterator[None]:
    """Add each bound that gradients are clipped to.

    Where clipping is ``removed``, the norm is all that it gives.
    """
    table, module = Table(), torch.nn.utils.clip_grad

    def scale(original: Any, parameters: Any, bound: float, *args: Any, **kwargs: Any) -> None:
        seen.append(float(bound))
        if not removed:
            original(parameters, bound, *args, **kwargs)

    def norm(
        original: Any, gradients: Any, kind: Any = 2.0, strict: bool = False, *args: Any
    ) -> Any:
        return original(gradients, kind, strict and not removed, *args)

    table.replace(module, "_clip_grads_with_norm_", scale)
    table.replace(torch.nn.utils, "clip_grads_with_norm_", scale)
    table.replace(module, "_get_total_norm", norm)
    try:
        yield
    finally:
        table.undo()


class Reads(FunctionMode):
    """Notes which lines of the user's own code read a value that is not finite.

    ``muted`` lines get finite values to see, as if they had not looked; with ``blind`` every line
    does. ``on``: whether anything is looked at.
    """

    def __init__(self, muted: Iterable[str] = ()) -> None:
        super().__init__()
        self.muted = frozenset(muted)
        self.lines: dict[str, None] = {}
        self.on, self.blind = True, False

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Stand in for a call of torch."""
        return self.call(func, args, kwargs, sys._getframe(2))

    def call(self, func: Any, args: Any, kwargs: Any, caller: FrameType) -> Any:
        """Return the result of a call; note the line that reads a planted value."""
        name = getattr(func, "__name__", "")
        if self.on and (name in _READERS or name in _MENDERS) and any(map(_is_bad, args)):
            line = users_line(caller)
            if line and not self.blind:
                self.lines[line] = None
            if line and (self.blind or line in self.muted):
                if name in _MENDERS:
                    return args[0]
                args = tuple(_mended(each) if _is_bad(each) else each for each in args)
        return func(*args, **kwargs)


def users_line(frame: FrameType | None) -> str:
    """Return ``FILE:LINE`` of the code that called torch, or nothing where a library did, torch
    itself included.
    """
    while frame is not None and lies_in(
        frame.f_code.co_filename, "torch._tensor", "torch.overrides"
    ):
        frame = frame.f_back
    if frame is None or is_library(frame.f_code.co_filename):
        return ""
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _is_bad(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
        return False
    return not bool(value.detach().isfinite().all())


def _mended(value: Tensor) -> Tensor:
    return value.nan_to_num(nan=1.0, posinf=1.0, neginf=1.0)


class Voices(logging.Handler):
    """Keeps what is printed and logged inside ``with``, and off the terminal.

    Numbers are left out of the lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._printed = StringIO()
        self._logged: list[str] = []

    @property
    def lines(self) -> tuple[str, ...]:
        """Each line once, in order."""
        spoken = (*self._printed.getvalue().splitlines(), *self._logged)
        plain = (re.sub(r"[-+]?\d[\d.e+-]*", "#", line).strip() for line in spoken)
        return tuple(dict.fromkeys(line for line in plain if line))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record's message."""
        self._logged.append(record.getMessage())

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Keep everything inside, that of loggers with handlers of their own too."""
        loggers = [logging.getLogger(name) for name in (None, "transformers", "trl", "nanstop")]
        before = [(one, one.handlers[:]) for one in loggers]
        for one in loggers:
            one.handlers[:] = [self]
        try:
            with redirect_stdout(self._printed), redirect_stderr(self._printed):
                yield
        finally:
            for one, handlers in before:
                one.handlers[:] = handlers


def observing_updates(before: Callable[[Optimizer], None]) -> Table:
    """Call ``before`` ahead of each update of every optimizer, until the table is undone."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def told(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        before(optimizer)

    table = Table()
    table.hook(register_optimizer_step_pre_hook(told))
    return table
