"""What an optimizer is."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.measure.step_per_rate import step_per_rate, sums_of_squares
from nanstop.numerics.optimizer_state import innermost, state_faults
from nanstop.numerics.trained import held_by
from nanstop.numerics.weights import longest_step
from nanstop.records import OptimizerFacts


def optimizer_facts(
    optimizer: Optimizer | None, root: nn.Module, *, warms_up: bool = False
) -> OptimizerFacts | None:
    """Return what an optimizer of a model is, None without one.

    ``warms_up``: its learning rates rise to those that its schedule multiplies. Runs its class on a
    small matrix, and reads its state: synchronises the device where there is some.
    """
    if optimizer is None:
        return None
    groups: list[dict[str, Any]] = optimizer.param_groups
    if warms_up:
        groups = [group | {"lr": group.get("initial_lr", group.get("lr"))} for group in groups]
    group = groups[0]
    name = type(optimizer).__name__
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    betas = group.get("betas")
    kind = type(innermost(optimizer))
    tried = group | {"params": held_by(optimizer)}  # of all groups: a step may reach for them
    per_rate = step_per_rate(kind, tried)
    squares = sums_of_squares(kind, tried) if getattr(optimizer, "state", None) else frozenset()
    return OptimizerFacts(
        name=name,
        lr=_number(group.get("lr")),
        highest=_highest(groups),
        scheduled=_number(group.get("initial_lr")),
        given=_number(getattr(optimizer, "defaults", {}).get("lr")),
        per_rate=per_rate,
        step=longest_step(per_rate, groups) if per_rate is not None else None,
        eps=_number(group.get("eps")),
        betas=(float(betas[0]), float(betas[1])) if betas and len(betas) == 2 else None,
        momentum=max(filter(None, (_number(one.get("momentum")) for one in groups)), default=None),
        weight_decay=_number(group.get("weight_decay")),
        state_bits=8 if bits == 8 or "8bit" in name else None,
        fused=bool(group.get("fused")),
        state_faults=state_faults(optimizer, root.named_parameters(), squares),
    )


def _highest(groups: list[dict[str, Any]]) -> float | None:
    """Return the highest of the rates of groups, None where all are the same."""
    rates = {rate for group in groups if (rate := _number(group.get("lr"))) is not None}
    if len(rates) < 2:
        return None
    return next((rate for rate in rates if math.isnan(rate)), max(rates))


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float, Tensor)) else None
