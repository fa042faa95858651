"""Remedies of the update: loss scale, clipping, learning rate, eps, format of the optimizer's
state, another optimizer.

Those of the optimizer act through its own step hooks, which every wrapper (accelerate, GradScaler,
a scheduler's counter) reaches, and are in force during the step only: what a scheduler writes
meanwhile is not disturbed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from nanstop.errors import NanstopError
from nanstop.numerics.optimizer_state import innermost
from nanstop.numerics.tensors import HALF
from nanstop.numerics.trained import held_by
from nanstop.records import Atom
from nanstop.remedies.storage import plain_format, state_saved_as, state_swapped
from nanstop.replay.held import swapped
from nanstop.replay.step import ModelView
from nanstop.replay.undo import exchanged, without_gradients

_BNB_BLOCK = 256
"""Elements that share one scale in a bitsandbytes 8-bit state."""


@contextmanager
def loss_scale(view: ModelView, atom: Atom) -> Iterator[None]:
    """Multiply the loss scale by the value inside.

    One that the scaler itself moved meanwhile is left to it. Reads the scale, which synchronises
    the device. Errors: ``NanstopError`` without a scaler.
    """
    factor = _number(atom)
    scaler = view.scaler
    if scaler is None or not scaler.is_enabled():
        raise NanstopError(f"{atom}: this run has no loss scaler")
    before = scaler.get_scale()
    _set_scale(scaler, before * factor)
    during = scaler.get_scale()
    try:
        yield
    finally:
        if scaler.get_scale() == during:
            _set_scale(scaler, before)


def _set_scale(scaler: torch.amp.GradScaler, scale: float) -> None:
    # update(scale) would also forget which optimizers are unscaled already
    scaler.load_state_dict(scaler.state_dict() | {"scale": scale})


@contextmanager
def unscale(view: ModelView, atom: Atom) -> Iterator[None]:
    """Divide the gradients of the whole optimizer by the value before each step inside."""
    factor, optimizer = _number(atom), _optimizer(view, atom)

    def divided(*_: Any) -> None:
        for parameter in held_by(optimizer):
            if parameter.grad is not None:
                parameter.grad.div_(factor)

    with optimizer.register_step_pre_hook(divided):
        yield


@contextmanager
def clip(view: ModelView, atom: Atom) -> Iterator[None]:
    """Clip the gradients of the whole optimizer to this 2-norm before each step inside.

    Under a loss scale the limit is scaled as they are.
    """
    limit, optimizer = _number(atom), _optimizer(view, atom)

    def clipped(*_: Any) -> None:
        with_gradients = [p for p in held_by(optimizer) if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(with_gradients, limit * _pending_scale(optimizer))

    with optimizer.register_step_pre_hook(clipped):
        yield


def lr(view: ModelView, atom: Atom) -> AbstractContextManager[None]:
    """Multiply the learning rate of each group by the value during the optimizer's step."""
    factor, optimizer = _number(atom), _optimizer(view, atom)
    return _around_step(
        optimizer, lambda: _group_values(optimizer, "lr", lambda value: value * factor)
    )


def weight_decay(view: ModelView, atom: Atom) -> AbstractContextManager[None]:
    """Set the weight decay of each group to the value during the optimizer's step, where it is
    more.

    Errors: ``NanstopError`` where the optimizer has none.
    """
    decay = _number(atom) if atom.value != "0" else 0.0
    optimizer = _optimizer(view, atom)
    if not all("weight_decay" in group for group in optimizer.param_groups):
        raise NanstopError(f"{atom}: this optimizer has no weight decay")
    return _around_step(
        optimizer, lambda: _group_values(optimizer, "weight_decay", lambda now: min(now, decay))
    )


def optimizer_eps(view: ModelView, atom: Atom) -> AbstractContextManager[None]:
    """Set eps of each group to the value during the optimizer's step.

    Errors: ``NanstopError`` where the optimizer has none.
    """
    eps, optimizer = _number(atom), _optimizer(view, atom)
    if not all("eps" in group for group in optimizer.param_groups):
        raise NanstopError(f"{atom}: this optimizer has no eps")
    return _around_step(optimizer, lambda: _group_values(optimizer, "eps", lambda _: eps))


@contextmanager
def fp32_optimizer_state(view: ModelView, atom: Atom) -> Iterator[None]:
    """Moments in float32, and the step computed in float32; parameters stay stored as they are."""
    optimizer = _optimizer(view, atom)
    halves = [p for p in held_by(optimizer) if p.dtype in HALF]
    with (
        state_swapped(optimizer, halves, torch.float32),
        _around_step(optimizer, lambda: swapped(halves, torch.float32)),
    ):
        yield


def optimizer_swap(view: ModelView, atom: Atom) -> AbstractContextManager[None]:
    """AdamW with float32 state behind the object that the host holds, going on from the moments it
    has.

    What leaves an Adam of torch's holds the moments that it would go on from.
    """
    if atom.value != "adamw":
        raise NanstopError(f"{atom}: the value must be adamw")
    return _optimizer_swap(_optimizer(view, atom))


@contextmanager
def _optimizer_swap(optimizer: Optimizer) -> Iterator[None]:
    replacement = _Replacement(optimizer)
    with (
        optimizer.register_load_state_dict_post_hook(lambda _: replacement.state.clear()),
        state_saved_as(optimizer, replacement.saved),
        _around_step(optimizer, replacement.step_instead),
    ):
        yield


class _Replacement:
    """AdamW in float32 over the parameters and groups of another optimizer."""

    def __init__(self, host: Optimizer) -> None:
        self.host = host
        self.state: dict[Tensor, tuple[Tensor, Tensor, Tensor]] = {}

    @contextmanager
    def step_instead(self) -> Iterator[None]:
        """Update; inside, the host's optimizer sees no gradients, so that its own step does
        nothing.
        """
        if not _found_inf(self.host):
            self._update()
        with without_gradients(held_by(self.host)):
            yield

    @torch.no_grad()
    def _update(self) -> None:
        scale = _pending_scale(self.host)
        for group in self.host.param_groups:
            held = [p for p in group["params"] if p.grad is not None]
            values = [p.float() for p in held]
            moments = [self._moments(p) for p in held]
            beta1, beta2 = group.get("betas", (0.9, 0.999))[:2]
            adamw(
                values,
                [p.grad.float() / scale for p in held],
                [first for first, _, _ in moments],
                [second for _, second, _ in moments],
                [],
                [steps for _, _, steps in moments],
                foreach=False,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group.get("weight_decay", 0.0),
                eps=group.get("eps", 1e-8),
                maximize=group.get("maximize", False),
            )
            for parameter, value in zip(held, values, strict=True):
                parameter.copy_(value)

    def saved(self, parameter: Any, entries: dict[str, Any]) -> dict[str, Any]:
        """Return what the host's state of a parameter would be;
        of another kind of optimizer what it is.
        """
        if parameter not in self.state or not isinstance(self.host, torch.optim.Adam | AdamW):
            return entries
        first, second, steps = self.state[parameter]
        known = {"step": steps, "exp_avg": first, "exp_avg_sq": second}
        formats = {name: value.dtype for name, value in entries.items() if name in known}
        usual = {"step": steps.dtype}
        return entries | {
            name: value.to(formats.get(name, usual.get(name, plain_format(parameter))))
            for name, value in known.items()
        }

    def _moments(self, parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if parameter not in self.state:
            self.state[parameter] = _moments_of(self.host.state.get(parameter, {}), parameter)
        return self.state[parameter]


def _moments_of(state: dict[str, Any], parameter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return first and second moment and step count, float32, of torch's or bitsandbytes' Adam;
    zeros of any other.

    Moments that no Adam can have made (not finite, a negative second one) are not taken over.
    """
    first = _moment(state, "exp_avg", "1", parameter)
    second = _moment(state, "exp_avg_sq", "2", parameter)
    steps = torch.tensor(float(state.get("step", 0)))
    if first is not None and second is not None:
        possible = first.isfinite() & second.isfinite() & (second >= 0)
        if bool(possible.all()):
            return first, second, steps
    none = torch.zeros_like(parameter, dtype=torch.float32)
    return none, none.clone(), torch.zeros_like(steps)


def _moment(state: dict[str, Any], name: str, digit: str, parameter: Tensor) -> Tensor | None:
    value = state.get(name, state.get(f"state{digit}"))
    if value is None or value.shape != parameter.shape:
        return None
    if value.dtype != torch.uint8:
        return value.float().clone()
    scale = state.get(f"absmax{digit}")
    if scale is None:
        return None
    scales = scale.repeat_interleave(_BNB_BLOCK)[: value.numel()].view(value.shape)
    return state[f"qmap{digit}"][value.long()] * scales


@contextmanager
def _around_step(
    optimizer: Optimizer, circumstances: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Enter ``circumstances()`` before each step and leave them after it, the last entered
    first.
    """
    pending = ExitStack()

    def enter(*_: Any) -> None:
        pending.close()  # a step that raised never reached its post hook
        pending.enter_context(circumstances())

    def leave(*_: Any) -> None:
        pending.close()

    before = optimizer.register_step_pre_hook(enter)
    after = optimizer.register_step_post_hook(leave)
    hooks = cast("OrderedDict[int, Any]", optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(after.id, last=False)
    with pending, after, before:
        yield


@contextmanager
def _group_values(optimizer: Optimizer, key: str, change: Callable[[Any], Any]) -> Iterator[None]:
    with ExitStack() as undo:
        for group in optimizer.param_groups:
            undo.enter_context(exchanged(group, {key: change(group[key])}))
        yield


def _optimizer(view: ModelView, atom: Atom) -> Optimizer:
    optimizer = view.optimizer
    if optimizer is None:
        raise NanstopError(f"{atom}: this run has no optimizer yet")
    return innermost(optimizer)


def _pending_scale(optimizer: Optimizer) -> float:
    """Return the loss scale that a fused step will still divide by (GradScaler hands it over),
    else 1. Synchronises.
    """
    scale = vars(optimizer).get("grad_scale")
    return 1.0 if scale is None else float(scale)


def _found_inf(optimizer: Optimizer) -> bool:
    found = vars(optimizer).get("found_inf")
    return found is not None and bool(found)


def _number(atom: Atom) -> float:
    """Return the atom's value as a positive finite number."""
    try:
        number = float(atom.value)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise NanstopError(f"{atom}: the value must be a positive number")
    return number
