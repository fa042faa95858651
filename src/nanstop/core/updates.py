"""What one optimizer update does to the weights: which elements it should move and cannot, and what its state holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.core.localize import eager
from nanstop.core.numerics import format_name, has_bad, is_measurable, nonfinite_names
from nanstop.core.step import Step
from nanstop.errors import NanstopError
from nanstop.records import StateRow, UpdateRow

_SECOND_MOMENTS = ("exp_avg_sq", "state2", "v", "square_avg", "exp_avg_sq_row", "exp_avg_sq_col")
_COMPENSATIONS = ("kahan", "compensation", "shift")
"""Parts of the names of entries that keep what rounding took: nothing is lost where there is one."""


@dataclass(frozen=True, slots=True)
class Update:
    """The probed update, by parameter. ``broken``: parameters that it makes non-finite."""

    lr: float
    rows: tuple[UpdateRow, ...]
    states: tuple[StateRow, ...]
    broken: tuple[str, ...] = ()


def probe_update(step: Step) -> Update:
    """Run a window and its update as the host does, with its optimizer and state, and undo both bitwise.

    The learning rate is the one that the run warms up to: the first rate of a warm-up is 0, and moves nothing.

    An element is lost where the gradient is not zero (and finite) and the weight is the same bit for bit after the
    update: fl(w + u) = w. The optimizer's own tensors are looked at: behind float32 master weights nothing is lost.
    Raises NanstopError where no update is made: no optimizer, gradients that are not finite, a learning rate of 0.
    """
    optimizer = step.view.optimizer
    if optimizer is None:
        raise NanstopError("there is no optimizer")
    with step.isolated(with_update=True), eager(), torch.enable_grad():
        for micro in range(len(step.batches)):
            step.run(micro)
        trained = _trained(step, optimizer)
        if not trained:
            raise NanstopError("no parameter of the optimizer has a gradient")
        moved = {name: _Before(p.detach().clone(), _nonzero(p)) for name, p in trained.items()}
        if any(has_bad(p.grad) for p in trained.values() if p.grad is not None):
            raise NanstopError("the gradients are not finite, so that no update is made")
        lr = _to_peak(optimizer)
        step.update()
        return Update(lr, *_read(optimizer, trained, moved), nonfinite_names(trained.items()))


@dataclass(frozen=True, slots=True)
class _Before:
    weight: Tensor
    should_move: Tensor


def _trained(step: Step, optimizer: Optimizer) -> dict[str, Tensor]:
    names = {id(p): name for name, p in step.view.root.named_parameters()}
    every = (p for group in optimizer.param_groups for p in group["params"])
    return {
        names.get(id(p), f"#{place}"): p
        for place, p in enumerate(every)
        if p.grad is not None and is_measurable(p) and not p.grad.is_sparse
    }


def _nonzero(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad != 0


def _read(
    optimizer: Optimizer, trained: Mapping[str, Tensor], before: Mapping[str, _Before]
) -> tuple[tuple[UpdateRow, ...], tuple[StateRow, ...]]:
    rows, states = [], []
    for name, parameter in trained.items():
        state = optimizer.state.get(parameter, {})
        should = before[name].should_move
        stood = should & (parameter.detach() == before[name].weight)
        if _compensates(state):
            stood = torch.zeros_like(stood)
        lost, total = torch.stack([stood.sum(), should.sum()]).tolist()
        dtype = format_name(parameter.dtype)
        rows.append(UpdateRow(parameter=name, dtype=dtype, num_lost=lost, num_total=total))
        states += [
            StateRow(
                parameter=name,
                dtype=form,
                num_vanished=int((should.flatten() & ~kept.flatten()).sum()),
                num_total=total,
            )
            for form, kept in _second_moments(state)
            if kept.numel() == should.numel()
        ]
    return tuple(rows), tuple(states)


def _to_peak(optimizer: Optimizer) -> float:
    """Give each group the rate that its schedule multiplies, and return the largest."""
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group.get("lr", 0.0))
    lr = max(float(group["lr"]) for group in optimizer.param_groups)
    if not lr:
        raise NanstopError("the learning rate is 0")
    return lr


def _compensates(state: Mapping[str, Any]) -> bool:
    return any(part in str(key).lower() for key in state for part in _COMPENSATIONS)


def _second_moments(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield (format, where it is not zero) of each second moment; an 8-bit one through its table of values."""
    for key in _SECOND_MOMENTS:
        value = state.get(key)
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        table = state.get("qmap2")
        if value.dtype is torch.uint8 and isinstance(table, Tensor):
            yield "8-bit", table[value.long()] != 0
        elif value.is_floating_point():
            yield format_name(value.dtype), value != 0
