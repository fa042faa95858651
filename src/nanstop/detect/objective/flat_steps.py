"""Whether what is trained lies behind an operation that is flat between its steps: rounding, a
sign. The derivative is 0 there, so that gradients arrive and hold nothing but zeros.

Zeros are usual: an adapter's other half, experts that are not asked, a hinge that is content. It is
told where they were there in each of some updates while others had a gradient, the loss is another
one with other weights, and gradients come in a micro-batch that is run again, undone, with the
operation passed by.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nanstop.numerics.trained import held_by
from nanstop.replay.conditions import eager
from nanstop.tracing.places import line_text, user_line

if TYPE_CHECKING:
    from nanstop.measure.followed import Line
    from nanstop.replay.step import Step

UPDATES = (2, 4, 8)
"""Updates of an optimizer that are looked at, from 0 on."""
_STARTS = 4096
_FLAT: frozenset[Any] = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn")
)


class FlatSteps:
    """Follows what each optimizer holds and has had gradients of zeros alone."""

    def __init__(self) -> None:
        self._zeros: WeakKeyDictionary[Any, list[Tensor]] = WeakKeyDictionary()

    def note(self, optimizer: Any, number: int) -> list[Tensor]:
        """Return, before the last of the updates, what has had zeros alone in each of them, while
        others had a gradient. Synchronises the device in them, and reads a part of each gradient in
        the first.
        """
        if number not in UPDATES:
            return []
        is_first = number == UPDATES[0]
        known = held_by(optimizer) if is_first else self._zeros.get(optimizer, ())
        given = [p for p in known if _is_plain(p.grad)]
        likely = _only_zeros(given, lambda grad: grad.reshape(-1)[:_STARTS])
        zeros = _only_zeros(likely, lambda grad: grad)
        if is_first and len(zeros) == len(given):  # nobody learns
            zeros = []
        self._zeros[optimizer] = zeros
        return zeros if number == UPDATES[-1] else []


def _is_plain(gradient: Tensor | None) -> bool:
    """Return whether a gradient is here as a whole: asked of one that lies on several processes,
    each would wait for the others.
    """
    return type(gradient) is Tensor and gradient.layout == torch.strided


def _only_zeros(parameters: Sequence[Tensor], part: Any) -> list[Tensor]:
    if not parameters:
        return []
    flags = [part(p.grad).any().to(parameters[0].device) for p in parameters]
    kept = torch.stack(flags).tolist()
    return [p for p, is_any in zip(parameters, kept, strict=True) if not is_any]


def passed_by(step: Step, zeros: Sequence[Tensor]) -> tuple[list[Tensor], str]:
    """Return which of some parameters get a gradient in the first micro-batch with operations
    passed by whose derivative is 0 wherever they have one, and the line of the last of these.

    Undone bitwise; runs the micro-batch once more for each line that has any. Synchronises the
    device.
    """
    plain = _PassedBy(None)
    _reached(step, zeros, plain)
    for line in reversed(plain.lines):
        found = _reached(step, zeros, _PassedBy(line))
        if found:
            return found, line_text(line)
    return [], ""


def _reached(step: Step, zeros: Sequence[Tensor], mode: _PassedBy) -> list[Tensor]:
    with step.isolated(), eager(), mode:
        step.run(0)
        return [p for p in zeros if p.grad is not None and bool(p.grad.any())]


class _PassedBy(TorchFunctionMode):
    """Gives flat operations of one line the gradient of what they are given; keeps the lines of
    those to which one would come.
    """

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self.lines: list[Line] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _FLAT or not isinstance(result, Tensor) or not args:
            return result
        given = cast("Tensor", args[0])
        if not given.requires_grad or given.shape != result.shape:
            return result
        line = user_line()
        if line not in self.lines:
            self.lines.append(line)
        return result if line != self._line else given + (result - given).detach()
