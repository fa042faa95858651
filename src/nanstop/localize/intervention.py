"""Experiments on causes: the first bad operation again, with a small change of what it reads.

A division that fails because a count is 0 is finite with a count of 1; a softmax that fails because
a row hides every key is finite with one key in sight. What stays bad had another cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nanstop.numerics.tensors import bad_mask, is_measurable, ramp
from nanstop.records import Change, Finiteness, OpEvent
from nanstop.records.vocabulary import ChangeKind
from nanstop.replay.step import Step
from nanstop.tracing.op_details import replaced_in
from nanstop.tracing.op_patches import ReachedError, SecondRun
from nanstop.tracing.operators import operands_of, outputs_of
from nanstop.tracing.record_step import run_under

_OF_A_SUM = 1e-2
"""How far a sum of probabilities is off at most: those of bfloat16 sum to 1 within it."""


def intervene(
    step: Step, micro: int, event: OpEvent, change: Change, *, update: bool = False
) -> Finiteness:
    """Return whether an operation of a micro-batch (or of the update) is finite under a change.

    "unknown": the operation was not met again, or has no operand that can be changed so. The run is
    undone and ends at the operation. Synchronises the device.
    """
    mode = _Changed(event, change)
    run_under(step, micro, mode, update=update)
    return mode.outcome


class _Changed(SecondRun):
    """Counts operations, and gives one of them a changed operand."""

    def __init__(self, event: OpEvent, change: Change) -> None:
        super().__init__()
        self.outcome: Finiteness = "unknown"
        self._event, self._change = event, change

    def call(self, index: int, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        if index != self._event.index:
            return func(*args, **kwargs)
        if str(func) == self._event.op:
            self.outcome = self._tried(func, args, kwargs)
        raise ReachedError

    @torch.no_grad()
    def _tried(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Finiteness:
        read = operands_of(func, args, kwargs)
        if self._change.operand >= len(read):
            return "unknown"
        chosen = read[self._change.operand]
        changed = _CHANGES[self._change.kind](chosen, self._change.value)
        if changed is None:
            return "unknown"
        copies = {id(tensor): tensor.clone() for tensor in read} | {id(chosen): changed}
        args, kwargs = replaced_in(args, kwargs, copies)
        outputs = outputs_of(func, args, kwargs, func(*args, **kwargs))
        bad = (bool(bad_mask(output).any()) for output in outputs if is_measurable(output))
        return "nonfinite" if any(bad) else "finite"


def _raise_zeros(tensor: Tensor, value: float) -> Tensor | None:
    zeros = tensor == 0
    return torch.where(zeros, torch.full_like(tensor, value), tensor) if zeros.any() else None


def _fill_rows(tensor: Tensor, value: float) -> Tensor | None:
    """Return the tensor with ``value`` once in each row of zeros: along the last dimension, else in
    all that belongs to one index of the first. One without such rows is returned as it is.
    """
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return None
    changed = tensor.clone(memory_format=torch.contiguous_format)
    for rows in (changed.flatten(0, -2), changed.flatten(1)):
        empty = ~rows.any(-1)
        if bool(empty.any()):
            rows[empty, 0] = value
            break
    return changed


def _bound(tensor: Tensor, value: float) -> Tensor | None:
    return tensor.clamp(-value, value) if tensor.is_floating_point() else None


def _unmask(tensor: Tensor, value: float) -> Tensor | None:
    """Return a mask or masked scores with ``value`` first in each row that hides everything."""
    is_bool = tensor.dtype is torch.bool
    hidden = ~tensor if is_bool else tensor == -torch.inf
    if tensor.dim() < 1 or not (rows := hidden.all(-1)).any():
        return None
    changed = tensor.clone()
    changed[..., 0] = torch.where(rows, torch.full_like(changed[..., 0], value), changed[..., 0])
    return changed


def _supervise(tensor: Tensor, value: float) -> Tensor | None:
    if tensor.is_floating_point() or tensor.numel() == 0:
        return None
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def _vary(tensor: Tensor, value: float) -> Tensor | None:
    return tensor + value * ramp(tensor) if tensor.is_floating_point() else None


def _exponentiate(tensor: Tensor, value: float) -> Tensor | None:
    """Return the exponentials of logarithms, those of each row summing to ``value``; anything else
    as it is.
    """
    if not tensor.is_floating_point() or tensor.dim() < 2:
        return None
    changed = tensor.exp()
    sums = (changed.sum(dim, dtype=torch.float32) for dim in (-1, 1))
    are_shares = any(bool(((one - value).abs() <= _OF_A_SUM).all()) for one in sums)
    return changed if are_shares else tensor


_CHANGES: Mapping[ChangeKind, Callable[[Tensor, float], Tensor | None]] = {
    "raise_zeros": _raise_zeros,
    "fill_rows": _fill_rows,
    "bound": _bound,
    "unmask": _unmask,
    "supervise": _supervise,
    "vary": _vary,
    "exponentiate": _exponentiate,
}
