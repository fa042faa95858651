"""What one optimizer update does to the weights:
which elements it should move and cannot, and what its state holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.errors import NanstopError
from nanstop.frozen import frozen
from nanstop.numerics.tensors import (
    format_name,
    has_bad,
    is_measurable,
    nonfinite,
    odd_stride,
)
from nanstop.numerics.trained import held_by
from nanstop.records import StateRow, UpdateRow
from nanstop.replay.conditions import eager
from nanstop.replay.step import Step

_SECOND_MOMENTS = ("exp_avg_sq", "state2", "v", "square_avg", "exp_avg_sq_row", "exp_avg_sq_col")
_COMPENSATIONS = ("kahan", "compensation", "shift", "master")
"""Parts of the names of entries that keep what rounding took:
nothing is lost where there is one.
"""


@frozen
class Update:
    """The probed update, by parameter. ``broken``: parameters that it makes non-finite."""

    lr: float
    rows: tuple[UpdateRow, ...]
    states: tuple[StateRow, ...]
    broken: tuple[str, ...] = ()


def probe_update(step: Step) -> Update:
    """Run a window and its update as the host does, with its optimizer and state, and undo both
    bitwise.

    The learning rate is the one that the run warms up to:
    the first rate of a warm-up is 0, and moves nothing.

    An element is lost where the gradient is not zero (and finite) and the weight is the same bit
    for bit after the update: fl(w + u) = w. The optimizer's own tensors are looked at: behind
    float32 master weights nothing is lost. Raises NanstopError where no update is made: no
    optimizer, gradients that are not finite, a learning rate of 0.
    """
    optimizer = step.view.optimizer
    if optimizer is None:
        raise NanstopError("there is no optimizer")
    with step.isolated(with_update=True), eager(), torch.enable_grad():
        for micro in range(len(step.batches)):
            step.run(micro)
        trained = trained_by(optimizer, step.view.root)
        if not trained:
            raise NanstopError("no parameter of the optimizer has a gradient")
        before = before_update(trained)
        if any(has_bad(p.grad) for p in trained.values() if p.grad is not None):
            raise NanstopError("the gradients are not finite, so that no update is made")
        lr = _to_peak(optimizer)
        step.update()
        return Update(lr, *after_update(optimizer, trained, before), nonfinite(trained))


def trained_by(optimizer: Optimizer, root: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's parameters that have a dense gradient;
    those that are not the model's by their place.
    """
    names = {id(p): name for name, p in root.named_parameters()}
    return {
        names.get(id(p), f"#{place}"): p
        for place, p in enumerate(held_by(optimizer))
        if p.grad is not None and is_measurable(p) and not p.grad.is_sparse
    }


@frozen
class Before:
    """Of every ``each``-th element of a parameter:
    its value, and whether an update should move it.
    """

    weight: Tensor
    should_move: Tensor
    each: int = 1


def before_update(
    parameters: Mapping[str, Tensor], *, most: int | None = None
) -> dict[str, Before]:
    """Return what ``after_update`` needs of the present weights and gradients:
    copies, no synchronisation.

    ``most``: how many elements to look at in all, evenly spread; every one by default.
    """
    total = sum(parameter.numel() for parameter in parameters.values())
    each = odd_stride(total, most or total)
    return {
        name: Before(_spread(p.detach(), each).clone(), _spread(p.grad, each) != 0, each)
        for name, p in parameters.items()
        if p.grad is not None
    }


def after_update(
    optimizer: Optimizer, parameters: Mapping[str, Tensor], before: Mapping[str, Before]
) -> tuple[tuple[UpdateRow, ...], tuple[StateRow, ...]]:
    """Return what the update that was made since then has lost, and what its second moments hold.

    Numbers are those of the elements that were looked at. Synchronises each device once.
    """
    kinds: list[tuple[bool, str, str]] = []
    sums: list[Tensor] = []
    for name, noted in before.items():
        parameter, should = parameters[name], noted.should_move
        state = optimizer.state.get(parameter, {})
        stood = should & (_spread(parameter.detach(), noted.each) == noted.weight)
        if _compensates(state):
            stood = torch.zeros_like(stood)
        kinds.append((True, name, format_name(parameter.dtype)))
        sums.append(torch.stack([stood.sum(), should.sum()]))
        for form, kept in second_moments(state, parameter, noted.each):
            if kept.device == should.device:
                vanished = should & ~kept
                kinds.append((False, name, form))
                sums.append(torch.stack([vanished.sum(), should.sum()]))
    rows = list(zip(kinds, _read(sums), strict=True))
    return (
        tuple(
            UpdateRow(parameter=name, dtype=form, num_lost=lost, num_total=total)
            for (is_update, name, form), (lost, total) in rows
            if is_update
        ),
        tuple(
            StateRow(parameter=name, dtype=form, num_vanished=lost, num_total=total)
            for (is_update, name, form), (lost, total) in rows
            if not is_update
        ),
    )


def _spread(tensor: Tensor, each: int) -> Tensor:
    return tensor.reshape(-1)[::each]


def _read(sums: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return pairs of numbers that lie on devices, with one synchronisation of each."""
    found: dict[int, tuple[int, int]] = {}
    for device in dict.fromkeys(pair.device for pair in sums):
        places = [place for place, pair in enumerate(sums) if pair.device == device]
        rows = torch.stack([sums[place] for place in places]).tolist()
        found |= {place: (lost, total) for place, (lost, total) in zip(places, rows, strict=True)}
    return [found[place] for place in range(len(sums))]


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


def second_moments(
    state: Mapping[str, Any], parameter: Tensor, each: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (format, where it is not zero) of every ``each``-th element of second moments of a
    parameter's size.

    An 8-bit one is read through its table of values.
    """
    for key in _SECOND_MOMENTS:
        value = state.get(key)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.numel() != parameter.numel():
            continue
        value, table = _spread(value, each), state.get("qmap2")
        if value.dtype is torch.uint8 and isinstance(table, Tensor):
            yield "8-bit", table[value.long()] != 0
        elif value.is_floating_point():
            yield format_name(value.dtype), value != 0
