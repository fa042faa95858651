"""Whether what is trained lies behind an operation whose derivative is 0: rounding, a sign, the
difference of a value from itself or its quotient by itself. Gradients arrive and hold nothing but
zeros, or roundings of them.

Zeros are usual: an adapter's other half, experts that are not asked, a hinge that is content. It is
told where they were there in each of some updates while others had a gradient, and gradients come
in a micro-batch that is run again, undone, with the operation passed by; of a step only where the
loss is another one with other weights, for it may be of what is counted and shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nanstop.frozen import frozen
from nanstop.numerics.trained import held_by
from nanstop.replay.conditions import eager
from nanstop.replay.function_modes import FunctionMode
from nanstop.tracing.places import line_text, user_line

if TYPE_CHECKING:
    from nanstop.replay.step import Step
    from nanstop.tracing.places import Line

UPDATES = (2, 4, 8)
"""Updates of an optimizer that are looked at, from 0 on."""
_STARTS = 4096
_ROUNDING = 1e-6
"""Of the largest gradient of all, what is none."""
_TIMES = 1e3
"""By how much more comes where what made roundings is passed by."""
_FLAT: frozenset[Any] = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("round", "floor", "ceil", "trunc", "fix", "sign", "sgn")
)
_OWN: dict[Any, float] = {
    getattr(owner, name): value
    for owner in (torch, torch.Tensor)
    for value, names in (
        (0.0, ("sub", "subtract", "__sub__")),
        (1.0, ("div", "divide", "true_divide", "__truediv__")),
    )
    for name in names
    if hasattr(owner, name)
}
"""What a difference of equals is, and their quotient."""


@frozen
class Passed:
    """What gets a gradient with the operation at ``line`` passed by; ``is_own``: one of equals."""

    parameters: tuple[Tensor, ...]
    line: str
    is_own: bool


class FlatSteps:
    """Follows what each optimizer holds and has had next to no gradient."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, tuple[list[Tensor], float]] = WeakKeyDictionary()

    def note(self, optimizer: Any, number: int) -> list[Tensor]:
        """Return, before the last of the updates, what has had zeros or roundings in each of them,
        while others had a gradient. Synchronises the device in them, and reads a part of each
        gradient in the first.
        """
        if number not in UPDATES:
            return []
        if number == UPDATES[0]:
            given = [p for p in held_by(optimizer) if is_plain(p.grad)]
            parts = _sizes_of(given, lambda grad: grad.reshape(-1)[:_STARTS])
            none = _ROUNDING * max(parts, default=0.0)
            learns = 0.0 < none < math.inf
            known = [p for p, size in zip(given, parts, strict=True) if learns and size <= none]
        else:
            known, none = self._known.get(optimizer, ([], 0.0))
            known = [p for p in known if is_plain(p.grad)]
        sizes = _sizes_of(known, lambda grad: grad)
        known = [p for p, size in zip(known, sizes, strict=True) if size <= none]
        self._known[optimizer] = known, none
        return known if number == UPDATES[-1] else []


def is_plain(gradient: Tensor | None) -> bool:
    """Return whether a gradient is here as a whole: asked of one that lies on several processes,
    each would wait for the others.
    """
    return type(gradient) is Tensor and gradient.layout == torch.strided


def _sizes_of(parameters: Sequence[Tensor], part: Any) -> list[float]:
    """Return the largest number of what is looked at of each gradient. Synchronises the device."""
    parts = [part(p.grad) for p in parameters]
    sizes = [
        one.abs().amax().float() if one.numel() else one.new_zeros(()).float() for one in parts
    ]
    return torch.stack([one.to(sizes[0].device) for one in sizes]).tolist() if sizes else []


def passed_by(
    step: Step, zeros: Sequence[Tensor], matters: Callable[[Sequence[Tensor]], bool] | None = None
) -> Passed | None:
    """Return which of some parameters get a gradient in the first micro-batch with operations
    passed by whose derivative is 0 wherever they have one, and the line of the last of these.

    ``matters``: whether the loss hangs on parameters; asked of a step. Undone bitwise; runs the
    micro-batch once more for each line that has any. Synchronises the device.
    """
    plain = _PassedBy(None)
    before = _sizes(step, zeros, plain)
    for line, is_own in reversed(plain.lines):
        if not is_own and matters is not None and not matters(zeros):
            continue
        after = _sizes(step, zeros, _PassedBy(line))
        got = tuple(
            p for p, old, new in zip(zeros, before, after, strict=True) if new > _TIMES * old
        )
        if got:
            return Passed(got, line_text(line), is_own)
    return None


def _sizes(step: Step, zeros: Sequence[Tensor], mode: _PassedBy) -> list[float]:
    with step.isolated(), eager(), mode:
        step.run(0)
        return [
            float(p.grad.abs().amax()) if p.grad is not None and p.grad.numel() else 0.0
            for p in zeros
        ]


class _PassedBy(FunctionMode):
    """Gives operations of one line whose derivative is 0 the gradient of what they are given;
    keeps the lines of those to which one would come, and whether they are of equals.
    """

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line
        self.lines: list[tuple[Line, bool]] = []

    def handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        is_own = func in _OWN and _is_of_equals(result, args, _OWN[func])
        if not (is_own or func in _FLAT) or not isinstance(result, Tensor) or not args:
            return result
        given = cast("Tensor", args[0])
        if not given.requires_grad or given.shape != result.shape:
            return result
        line = user_line()
        if (line, is_own) not in self.lines:
            self.lines.append((line, is_own))
        return result if line != self._line else given + (result - given).detach()


def _is_of_equals(result: Any, args: Any, value: float) -> bool:
    """Return whether a result is one number throughout, of two sides that gradients come to."""
    sides = [one for one in args[:2] if isinstance(one, Tensor) and one.requires_grad]
    if len(sides) < 2 or not isinstance(result, Tensor) or not result.numel():
        return False
    if not result.is_floating_point():
        return False
    near = 4 * torch.finfo(result.dtype).eps * value  # 0 of a difference is an exact one
    return bool(((result.detach() - value).abs() <= near).all())
