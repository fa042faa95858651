"""Differences that are nothing but the rounding of what they are differences of, where it matters.

The mean of squares less the square of the mean, of numbers around 4000, is 16000000 less 16000000:
what is left below 1 was rounded away before. Most such differences do no harm (a residual, the
ratio of a policy to itself). Whether one does is found by an experiment: its operand changed by one
rounding, and the loss with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.records import CancelledRow, op_name
from nanstop.tracing import operators
from nanstop.tracing.op_patches import LookOfSome, SecondRun
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

MOST_ELEMENTS = 4096
"""Of each difference, those that are looked at."""
ROUNDINGS = 32.0
"""Roundings of the operand within which a difference is made of them."""
LEAST_SHARE = 0.2
LEAST_CHANGE = 0.01
"""Of the loss, by one rounding."""
LEAST_LOSS = 0.01
"""Losses below this (of an objective that adds up to 0) have no relative change."""
MOST_TRIED = 4


class Cancellations(LookOfSome):
    """Keeps the indices of differences that are made of roundings: not those of a backward, which
    adds up what cancels.
    """

    ops = operators.ADDITIVE

    def __init__(self) -> None:
        self.found: list[int] = []

    def __call__(
        self, index: int, _func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        if len(args) < 2:
            return None
        first, second = args[:2]
        if not _is_float32(first) or not _is_float32(second) or first.shape != second.shape:
            return None
        size = first.detach().flatten()[:MOST_ELEMENTS].abs()

        def done(result: Any) -> None:
            left = result.detach().flatten()[:MOST_ELEMENTS].abs()
            tiny = (left <= ROUNDINGS * torch.finfo(torch.float32).eps * size) & (size > 0.0)
            # A value less itself is exactly 0: nothing was lost.
            if bool((left[tiny] > 0.0).any()) and float(tiny.float().mean()) >= LEAST_SHARE:
                self.found.append(index)

        return done


def cancelled_rows(step: Step, found: list[int]) -> tuple[CancelledRow, ...]:
    """Return the first of some differences whose roundings decide the loss of the first
    micro-batch, () where none does.

    Undone bitwise. Runs the micro-batch once, and twice for each of the first ``MOST_TRIED``.
    """
    plain = first_loss(step, SecondRun()) if found else 0.0
    for index in found[:MOST_TRIED]:
        both = [first_loss(step, _Rounded(index, up=up)) for up in (True, False)]
        change = min(abs(other - plain) for other in both)
        if abs(plain) >= LEAST_LOSS and change >= LEAST_CHANGE * abs(plain):
            op = first_ops(step)[index]
            row = CancelledRow(
                module=op.module,
                op=op.name,
                loss=plain,
                change=change / abs(plain),
                line=line_text(op.line),
            )
            return (row,)  # what comes after it is made of it
    return ()


class _Rounded(SecondRun):
    """Changes the first operand of one op by one rounding, up and down in turn."""

    def __init__(self, index: int, *, up: bool) -> None:
        super().__init__()
        self._index, self._up = index, up

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index != self._index:
            return func(*args, **kwargs)
        first = args[0]
        signs = torch.ones(first.numel(), device=first.device)
        signs[0 if self._up else 1 :: 2] = -1.0
        rounding = 1.0 + torch.finfo(torch.float32).eps * signs.view(first.shape)
        if str(func).endswith("_") or op_name(str(func)).endswith("_"):
            first.detach().mul_(rounding)
            return func(*args, **kwargs)
        return func(first * rounding, *args[1:], **kwargs)


def _is_float32(operand: Any) -> bool:
    return isinstance(operand, Tensor) and operand.dtype is torch.float32 and operand.dim() > 0
