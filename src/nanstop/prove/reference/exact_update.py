"""What an update does to each parameter, beside the step that the same gradients and the same state
make in a wider format.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from nanstop.numerics.optimizer_state import innermost
from nanstop.numerics.tensors import HALF
from nanstop.numerics.update_length import TOO_LONG
from nanstop.prove.failing_step import FailingStep
from nanstop.replay.conditions import Under
from nanstop.replay.copies.snapshot import Snapshot
from nanstop.replay.held import swapped
from nanstop.replay.step import Step, gradients_of, trainable_of, update_undone

_WIDER = {**dict.fromkeys(HALF, torch.float32), torch.float32: torch.float64}
_OFF = 0.05
"""Share of its exact length that an update may be off, besides the rounding of the weights."""


@dataclass(frozen=True, slots=True)
class Move:
    """How an update moves one parameter. ``exact``: the length of the exact update; ``gap``: the
    distance to it; ``weight``: the norm of the parameter before; ``spacing``: of its format, at 1.
    """

    name: str
    exact: float
    gap: float
    weight: float
    spacing: float

    @property
    def is_exact(self) -> bool:
        """Whether it is the exact update, rounded to the format of the parameter."""
        allowed = _OFF * self.exact + self.spacing * (self.weight + self.exact)
        return not math.isfinite(self.exact) or self.gap <= allowed


def fault_of_update(failing: FailingStep, under: Under) -> str:
    """Return what is wrong with the update of a failing step under a context, "" where nothing is.

    It is not the step that its gradients and its state make in a wider format; or that step itself
    is out of all proportion to the weights, and to the updates before it where there are any.
    Raises what the host's update raises.
    """
    moves = moves_of(failing, under)
    wrong = next((move for move in moves if not move.is_exact), None)
    if wrong is not None:
        return (
            f"`{wrong.name}` is moved {wrong.gap:.3g} off what the same gradients move it exactly"
        )
    length = math.hypot(*(move.exact for move in moves))
    weights = math.hypot(*(move.weight for move in moves))
    if weights == 0.0 or length <= TOO_LONG * weights:
        return ""
    usual = failing.usual_length()
    if usual is not None and length <= TOO_LONG * usual:
        return ""
    times = f"{length / weights:.3g} times as long as the weights"
    return f"the exact update is {times}: no format's doing"


def moved_otherwise(failing: FailingStep, under: Under) -> str:
    """Return which parameter a form moves otherwise than the failing update does where that has a
    value, "" for none. Raises what the host's update raises; synchronises the device.
    """
    step = failing.step
    with _ready(failing, nullcontext):
        begin, own = _values(step), _updated(step)
    with _ready(failing, under):
        formed = _updated(step)
    for name, values in own.items():
        known = values.isfinite()
        before, as_is, now = (one[known] for one in (begin[name], values, formed[name]))
        move = _move(step, name, before, now, as_is)
        if not move.is_exact:
            return f"`{name}` is moved {move.gap:.3g} off where it has a value without it"
    return ""


def moves_of(failing: FailingStep, under: Under) -> tuple[Move, ...]:
    """Return what the update of a failing step does to each parameter that it moves, undone.

    Each of the two is made in a context of its own: what a remedy keeps beside the optimizer
    (moments) goes on from one update to the next. () where the optimizer cannot work in a wider
    format. Synchronises the device; needs room for three copies of what is trained.
    """
    step = failing.step
    with _ready(failing, under):
        begin = _values(step)
        grads = {name: grad.clone() for name, grad in gradients_of(step.view.root).items()}
        own = _updated(step)
    with _ready(failing, under):
        for name, parameter in step.view.root.named_parameters():
            if name in grads:  # those of the first: what is drawn is no part of an update
                parameter.grad = grads.pop(name)
        try:
            with _wide(step):
                exact = _updated(step)
        except Exception:  # kernels that know some formats only
            return ()
    return tuple(_move(step, name, begin[name], own[name], exact[name]) for name in own)


def is_same_update(failing: FailingStep, under: Under, other: Under) -> bool:
    """Return whether the update of a failing step moves its parameters alike under two contexts.
    Synchronises the device.
    """
    found: list[dict[str, Tensor]] = []
    for one in (under, other):
        with _ready(failing, one):
            begin = _values(failing.step)
            found.append(_updated(failing.step))
    first, second = found
    moves = (_move(failing.step, name, begin[name], second[name], first[name]) for name in first)
    return all(math.isfinite(move.gap) and move.is_exact for move in moves)


@contextmanager
def _ready(failing: FailingStep, under: Under) -> Iterator[None]:
    """Be under a context inside, right before the update, which is undone."""
    step = failing.step
    with update_undone(step), failing.from_snapshot(under):
        for micro in range(len(step.batches)):
            step.run(micro)
        yield


def _move(step: Step, name: str, before: Tensor, own: Tensor, exact: Tensor) -> Move:
    dtype = trainable_of(step.view).parameters[name].dtype
    return Move(
        name,
        exact=float((exact - before).norm()),
        gap=float((own - exact).norm()),
        weight=float(before.norm()),
        spacing=torch.finfo(dtype).eps,
    )


def _updated(step: Step) -> dict[str, Tensor]:
    """Return the parameters as an update leaves them."""
    step.update()
    return _values(step)


def _values(step: Step) -> dict[str, Tensor]:
    parameters: Mapping[str, Tensor] = trainable_of(step.view).parameters
    # In its own format on the way: float64 is up to four times as much.
    return {name: p.detach().cpu().to(torch.float64, copy=True) for name, p in parameters.items()}


@contextmanager
def _wide(step: Step) -> Iterator[None]:
    """Have parameters, gradients and the optimizer's state in a wider format inside."""
    trained = trainable_of(step.view)
    noted = Snapshot(trained, device=None)
    optimizer = step.view.optimizer
    states = innermost(optimizer).state if optimizer is not None else {}
    with ExitStack() as undo:
        undo.callback(noted.restore)
        groups = {d: [p for p in trained.parameters.values() if p.dtype == d] for d in _WIDER}
        for dtype, own in groups.items():
            wide = _WIDER[dtype]
            undo.enter_context(swapped(own, wide))
            for parameter in own:
                state = states.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dtype == dtype and value.dim():
                        state[key] = value.to(wide)
        yield
