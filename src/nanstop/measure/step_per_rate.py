"""Whether a step of an optimizer is its learning rate, whatever the gradient, and which entries of
its state only take up squares or sizes of gradients: tried on a small matrix.

Adam, Lion and Adafactor move each weight by about the rate, gradient descent by the rate times the
gradient. The class is asked, not its name: a copy of the optimizer steps with gradients that differ
by a thousand, on matrices of two sizes. Adam's second moment is the same under the opposite
gradients, and nowhere below zero; a first moment changes its sign, and a copy of the weights is as
the weights are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from nanstop.measure.own_memory import leaving_no_trace
from nanstop.records import StepPerRate
from nanstop.replay.conditions import unheard
from nanstop.replay.rng import rng_kept

_NUM_STEPS = 12
"""Of which the last is measured: some take their first ones in another way."""
_RATE = 1e-3
_ALIKE = 1.2
_NUM_SIGNED, _WIDTH = 3, 8
_TRIALS: tuple[dict[str, Any], ...] = (
    {},
    {"weight": 10.0},
    {"gradient": 1e3},
    {"size": 16},
    {"num_steps": 2 * _NUM_STEPS},
)
_OTHERWISE: dict[str, Any] = {
    "lr": _RATE,
    "foreach": False,
    "fused": False,
    "capturable": False,
}


def step_per_rate(kind: type[Optimizer], options: Mapping[str, Any]) -> StepPerRate | None:
    """Return by how much a step of an optimizer moves a weight at a learning rate of 1, None where
    that depends on the gradient, or cannot be tried.

    ``options``: of one of its groups, or what it is made with. Takes 5 ms on the host; no
    constructor runs, no hook hears of it, no random number is drawn, and a script's own step leaves
    all tensors as they are, what it remembers, and the gradients of ``params``.
    """
    try:
        with rng_kept(), unheard(), torch.enable_grad(), _harmless(kind, options):
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


def sums_of_squares(kind: type[Optimizer], options: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the entries of a state that only take up squares or sizes of gradients,
    none where it cannot be tried.

    ``options``: of one of its groups. Takes 1 ms on the host; no constructor runs, no hook hears
    of it, and no random number is drawn.
    """
    try:
        with rng_kept(), unheard(), torch.enable_grad(), _harmless(kind, options):
            one, other = (_state(kind, options, sign) for sign in (1.0, -1.0))
    except Exception:  # code of any library on a matrix that it was not made for
        return frozenset()
    return frozenset(
        key
        for key, value in one.items()
        if isinstance(value, Tensor)
        and value.numel() > 1
        and value.is_floating_point()
        and bool(value.any() & (value >= 0).all())
        and isinstance(other.get(key), Tensor)
        and torch.equal(value, other[key])
    )


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
    """Return the root mean square of what the gradient adds in the last of some steps to weights of
    ``weight``, under the same gradient of about ``gradient``.

    That is half of what opposite gradients differ in: what a decay of the weights, by whatever
    name, adds to both is in neither.
    """
    draws = torch.Generator().manual_seed(0)
    pattern = gradient * torch.randn(size, size, generator=draws, dtype=torch.float64)

    def last_move(direction: Tensor) -> Tensor:
        matrix = torch.full((size, size), weight, dtype=torch.float64).requires_grad_()
        before = matrix.detach().clone()

        def gradients() -> Iterator[Tensor]:
            for _ in range(num_steps):
                before.copy_(matrix.detach())
                yield direction.clone()

        _stepped(kind, options, matrix, gradients())
        return matrix.detach() - before

    apart = last_move(pattern) - last_move(-pattern)
    return float(apart.square().mean().sqrt()) / 2


def _stepped(
    kind: type[Optimizer],
    options: Mapping[str, Any],
    matrix: Tensor,
    gradients: Iterable[Tensor],
) -> Optimizer:
    """Return a copy of an optimizer that has made a step of ``matrix`` by each of these gradients,
    without its constructor and hooks. Raises what its code raises.
    """
    optimizer = _unbuilt(kind, options, matrix)
    step: Any = kind.step
    own = step.__wrapped__ if hasattr(step, "hooked") else step
    for gradient in gradients:
        matrix.grad = gradient
        own(optimizer)
    return optimizer


def _harmless(kind: type[Optimizer], options: Mapping[str, Any]) -> AbstractContextManager[None]:
    params = [one for one in options.get("params", ()) if isinstance(one, Tensor)]
    return leaving_no_trace(kind, parameters=params)


def _unbuilt(kind: type[Optimizer], options: Mapping[str, Any], matrix: Tensor) -> Optimizer:
    """Return an optimizer as unpickling would make it."""
    known = {key: value for key, value in options.items() if key not in ("params", "param_names")}
    known.update((key, value) for key, value in _OTHERWISE.items() if key in known)
    made = kind.__new__(kind)
    group = {**known, "params": [matrix]}
    made.__setstate__({"defaults": known, "state": defaultdict(dict), "param_groups": [group]})
    return made


def _state(kind: type[Optimizer], options: Mapping[str, Any], sign: float) -> Mapping[str, Any]:
    draws = torch.Generator().manual_seed(0)
    weights, *gradients = torch.randn(
        1 + _NUM_SIGNED, _WIDTH, _WIDTH, generator=draws, dtype=torch.float64
    )
    matrix = weights.clone().requires_grad_()
    optimizer = _stepped(kind, options, matrix, [sign * gradient for gradient in gradients])
    return optimizer.state[matrix]
