"""Where the gradient ends: the operation that is sent one and passes none on.

A hinge that is content, a mask of zeros, labels that are all left out, units that are never above
0: wherever every gradient is 0, some operation is the last to have one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nanstop.frozen import frozen
from nanstop.numerics.nested import leaves
from nanstop.records import GradientEnd, LineNumber
from nanstop.replay.conditions import eager
from nanstop.replay.function_modes import FunctionMode
from nanstop.tracing.places import source_line, user_frame, user_line
from nanstop.tracing.source.line_numbers import zeros_of_line

if TYPE_CHECKING:
    from nanstop.replay.step import Step
    from nanstop.tracing.places import Line

_Arrivals = list[Tensor]
"""Of each gradient that came to a tensor, whether it has a number that is not 0."""


@frozen
class _Call:
    """One operation: its line, what came to what it was given and to what it made."""

    func: Any
    line: Line
    given: list[_Arrivals]
    made: list[_Arrivals]
    factors: tuple[LineNumber, ...]


def gradient_end(step: Step) -> GradientEnd | None:
    """Return the last operation of the first micro-batch that is sent a gradient and passes none
    on, with its line; None where there is none.

    Undone bitwise; runs the micro-batch once more, and raises what that raises. Synchronises the
    device.
    """
    mode = _Followed()
    with step.isolated(), eager(), torch.enable_grad(), mode:
        step.run(0)
        op, line, factors = mode.end()
    return GradientEnd(op=op, source=source_line(line), factors=factors) if op else None


class _Followed(FunctionMode):
    """Keeps of each operation with a gradient its line, and what comes to it and to what it was
    given.
    """

    def __init__(self) -> None:
        super().__init__()
        self._arrivals: Any = WeakTensorKeyDictionary()
        self._calls: list[_Call] = []

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        # What an autograd function of somebody's own has made comes from no call that is seen.
        trained = _trained(args, kwargs) if torch.is_grad_enabled() else []
        given = [self._known(one) for one in trained]
        factors = _factors(args) if given else ()
        result = func(*args, **kwargs)
        made = [self._heard(one) for one in _trained(result) if one.grad_fn is not None]
        if given and made:
            self._calls.append(_Call(func, user_line(), given, made, factors))
        return result

    def end(self) -> tuple[str, Line, tuple[LineNumber, ...]]:
        """Return the operation at which gradients end, once a backward is through."""
        for call in reversed(self._calls):
            if _is_sent(call.made) and not _is_sent(call.given):
                return getattr(call.func, "__name__", "").strip("_"), call.line, call.factors
        return "", None, ()

    def _known(self, tensor: Tensor) -> _Arrivals:
        arrivals: _Arrivals | None = self._arrivals.get(tensor)
        return self._heard(tensor) if arrivals is None else arrivals

    def _heard(self, tensor: Tensor) -> _Arrivals:
        arrivals: _Arrivals = []
        tensor.register_hook(partial(_arrived, arrivals))
        self._arrivals[tensor] = arrivals
        return arrivals


def _factors(args: Any) -> tuple[LineNumber, ...]:
    """Return what a plain 0 that an operation is given is spelled as, where it is a factor."""
    frame = user_frame() if any(_is_plain_0(one) for one in args) else None
    return zeros_of_line(frame, "factor") if frame is not None else ()


def _is_plain_0(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _arrived(arrivals: _Arrivals, grad: Tensor | None) -> None:
    """Note a gradient that has come; of a function of somebody's own it may be None."""
    if grad is not None:
        arrivals.append(grad.detach().any())


def _is_sent(arrivals: list[_Arrivals]) -> bool:
    return any(bool(one) for of_one in arrivals for one in of_one)


def _trained(*values: Any) -> list[Tensor]:
    return [one for one in leaves(*values, kind=Tensor) if one.requires_grad]
