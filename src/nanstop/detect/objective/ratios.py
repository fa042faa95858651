"""Ratios of single tokens between two models, and whether the loss is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanstop.detect.objective.operands.numbers import TOLERANCE
from nanstop.records import RatioRow, op_name
from nanstop.tracing.op_patches import LookOfSome, OtherResult
from nanstop.tracing.places import line_text
from nanstop.tracing.record_step import first_loss, first_ops

if TYPE_CHECKING:
    from nanstop.replay.step import Step

MOST_TRIED = 4
LARGE_RATIO = 1e6
"""Of the probabilities that two models give to one token: 14 nats apart. Clipping is at 1.2."""

_MOST_NATS = 700.0
"""Beyond it the ratio is no number of float64."""


class Ratios(LookOfSome):
    """Keeps the largest exponential of a difference of log-probabilities, by
    the op's index.

    Two tensors without a number above 0 are such where a gradient comes to one alone: a policy, and
    what it is compared with. Of a difference of sums over answers those of their tokens are asked.
    Synchronises the device at sums, differences and their exponentials.
    """

    ops = frozenset({"sub", "exp", "sum"})

    def __init__(self) -> None:
        self.largest: dict[int, float] = {}
        self.of_answers: set[int] = set()
        """Differences of whole answers among them."""
        self._differences: set[tuple[int, torch.Size]] = set()
        self._tokens: dict[int, tuple[Tensor, Tensor]] = {}
        """Sums over rows of log-probabilities, each with those, by where it lies."""

    def __call__(
        self, index: int, func: Any, args: Any, _kwargs: Mapping[str, Any]
    ) -> Callable[[Any], None] | None:
        base = op_name(str(func))

        def done(result: Any) -> None:
            if base == "sum":
                self._summed(args[0], result)
            elif base == "sub":
                if _are_of_two(*args[:2]):
                    self._differences.add(place_of(result))
                    self._compare(index, *args[:2])
            elif place_of(args[0]) in self._differences:
                self.largest[index] = float(result.detach().amax())

        return done

    def _summed(self, tokens: Any, result: Tensor) -> None:
        if tokens.dim() != 2 or result.shape != tokens.shape[:1] or not result.is_contiguous():
            return
        if bool((tokens.detach() <= TOLERANCE).all()):
            key = result.untyped_storage().data_ptr()
            self._tokens[key] = result.detach(), tokens.detach()

    def _compare(self, index: int, first: Tensor, second: Tensor) -> None:
        """Look at the tokens of two answers whose sums are compared."""
        one, other = self._tokens_of(first), self._tokens_of(second)
        if one is None or other is None or one.shape != other.shape:
            return
        apart = float((one - other).abs().amax())
        self.largest[index] = math.exp(min(apart, _MOST_NATS))
        self.of_answers.add(index)

    def _tokens_of(self, sums: Tensor) -> Tensor | None:
        _, tokens = self._tokens.get(sums.untyped_storage().data_ptr(), (None, None))
        if tokens is None or sums.dim() != 1 or not sums.is_contiguous():
            return None
        rows = tokens[sums.storage_offset() : sums.storage_offset() + len(sums)]
        return rows if len(rows) == len(sums) else None


def are_compared(first: Any, second: Any) -> bool:
    """Return whether two operands are numbers of one shape, and a gradient comes to one alone."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return False
    if first.shape != second.shape or first.numel() < 2 or not first.is_floating_point():
        return False
    return first.requires_grad != second.requires_grad


def _are_of_two(first: Any, second: Any) -> bool:
    """Return whether two operands are log-probabilities of two models."""
    if not are_compared(first, second):
        return False
    both = torch.stack([first.detach().float().flatten(), second.detach().float().flatten()])
    return bool((both <= TOLERANCE).all()) and bool((both < 0.0).any(1).all())


def place_of(tensor: Tensor) -> tuple[int, torch.Size]:
    """Return what tells a tensor from another one while it lives."""
    return tensor.data_ptr(), tensor.shape


def ratio_rows(step: Step, ratios: Ratios) -> tuple[RatioRow, ...]:
    """Return the ratios of single tokens that are beyond reason and that the loss is made of: a
    mask may leave them out. Undone bitwise; runs the first micro-batch again where there is one.
    """
    large = [index for index, value in ratios.largest.items() if value >= LARGE_RATIO]
    plain = first_loss(step, _doubled(-1, ratios)) if large else 0.0
    used = [n for n in large[:MOST_TRIED] if first_loss(step, _doubled(n, ratios)) != plain]
    found = {index: ratios.largest[index] for index in used}
    if not found:
        return ()
    ops = first_ops(step)
    return tuple(
        RatioRow(
            op=ops[index].name,
            module=ops[index].module,
            largest=value,
            line=line_text(ops[index].line),
        )
        for index, value in found.items()
    )


def _doubled(index: int, ratios: Ratios) -> OtherResult:
    """Have one op give twice what it gives, of ratios what it gives beyond ``LARGE_RATIO``."""
    if index in ratios.of_answers:
        return OtherResult(index, lambda found: 2.0 * found)
    return OtherResult(index, lambda found: torch.where(found >= LARGE_RATIO, 2.0 * found, found))
