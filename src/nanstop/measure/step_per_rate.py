"""Whether a step of an optimizer is its learning rate, whatever the gradient: tried on a small
matrix.

Adam, Lion and Adafactor move each weight by about the rate, gradient descent by the rate times the
gradient. The class is asked, not its name: a copy of the optimizer steps with gradients that differ
by a thousand, on matrices of two sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.records import StepPerRate
from nanstop.replay.conditions import unheard
from nanstop.replay.rng import rng_kept

_NUM_STEPS = 12
"""Of which the last is measured: some take their first ones in another way."""
_RATE = 1e-3
_ALIKE = 1.2
_TRIALS: tuple[dict[str, Any], ...] = (
    {},
    {"weight": 10.0},
    {"gradient": 1e3},
    {"size": 16},
    {"num_steps": 2 * _NUM_STEPS},
)
_OTHERWISE: dict[str, Any] = {
    "lr": _RATE,
    "weight_decay": 0.0,
    "foreach": False,
    "fused": False,
    "capturable": False,
}


def step_per_rate(kind: type[Optimizer], options: Mapping[str, Any]) -> StepPerRate | None:
    """Return by how much a step of an optimizer moves a weight at a learning rate of 1, None where
    that depends on the gradient, or cannot be tried.

    ``options``: of one of its groups, or what it is made with. Takes 5 ms on the host; no
    constructor runs, no hook hears of it, and no random number is drawn.
    """
    try:
        with rng_kept(), unheard(), torch.enable_grad():
            usual, heavier, *others = (_last_step(kind, options, **trial) for trial in _TRIALS)
    except Exception:  # code of any library on a matrix that it was not made for
        return None
    if not (usual > 0.0 and all(_alike(usual, other) for other in others)):
        return None
    if _alike(usual, heavier):
        return StepPerRate(length=float(f"{usual / _RATE:.2g}"))
    if _alike(10.0 * usual, heavier):
        return StepPerRate(length=float(f"{usual / _RATE:.2g}"), relative=True)
    return None


def _alike(one: float, other: float) -> bool:
    return one <= _ALIKE * other and other <= _ALIKE * one


def _last_step(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    *,
    gradient: float = 1.0,
    size: int = 8,
    weight: float = 1.0,
    num_steps: int = _NUM_STEPS,
) -> float:
    """Return the root mean square of what the last of some steps adds to weights of ``weight``
    under the same gradient of about ``gradient``.
    """
    matrix = torch.full((size, size), weight, dtype=torch.float64).requires_grad_()
    draws = torch.Generator().manual_seed(0)
    pattern = torch.randn(size, size, generator=draws, dtype=torch.float64)
    optimizer = _unbuilt(kind, options, matrix)
    step: Any = kind.step
    own = step.__wrapped__ if hasattr(step, "hooked") else step
    before = matrix.detach().clone()
    for _ in range(num_steps):
        before.copy_(matrix.detach())
        matrix.grad = pattern * gradient
        own(optimizer)
    return float((matrix.detach() - before).square().mean().sqrt())


def _unbuilt(kind: type[Optimizer], options: Mapping[str, Any], matrix: Tensor) -> Optimizer:
    """Return an optimizer as unpickling would make it."""
    known = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    known.update((key, value) for key, value in _OTHERWISE.items() if key in known)
    made = kind.__new__(kind)
    group = {**known, "params": [matrix]}
    made.__setstate__({"defaults": known, "state": defaultdict(dict), "param_groups": [group]})
    return made
