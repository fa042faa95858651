"""A learning-rate range test on a sequence of steps, after which everything is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.commands.lr_range.curve import LrRange, analyse, has_diverged, rates
from nanstop.replay.copies.buffers import BufferNotes
from nanstop.replay.copies.snapshot import Snapshot, Trainable
from nanstop.replay.rng import note_rng, restore_rng


def sweep(
    step: Callable[[], Any],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    low: float = 1e-7,
    high: float = 1.0,
    num_steps: int = 100,
) -> LrRange:
    """Train with rates that rise from ``low`` to ``high`` and return what the losses say.

    ``step()`` runs one whole training step on a batch of its own choice, the optimizer's update
    included, and returns the loss before that update. Parameters, gradients, buffers, optimizer
    state and random state are put back bitwise. Reads every loss, which synchronises the device.
    Errors: ``NanstopError`` NS001 as ``rates``, and those of ``step``.
    """
    planned = rates(low, high, num_steps)
    with _restored(model, optimizer):
        shares = shares_of(optimizer)
        first, losses = float("nan"), []
        for number, rate in enumerate((*planned, planned[-1])):
            set_rates(optimizer, shares, rate)
            loss = _number(step())
            if number:
                losses.append(loss)
            else:
                first = loss
            if has_diverged(first, losses):
                break
    return analyse(planned, first, losses)


def shares_of(optimizer: Any) -> tuple[float, ...]:
    """Return each group's rate as a share of the largest one. Reads rates that are tensors."""
    own = [float(group["lr"]) for group in optimizer.param_groups]
    return tuple(rate / max(own) if max(own) > 0.0 else 1.0 for rate in own)


def set_rates(optimizer: Any, shares: Sequence[float], rate: float) -> None:
    """Set the rate of each group to its share of ``rate``."""
    for group, share in zip(optimizer.param_groups, shares, strict=True):
        if isinstance(group["lr"], Tensor):  # a captured optimizer reads it where it lies
            group["lr"].fill_(rate * share)
        else:
            group["lr"] = rate * share


def _number(loss: Any) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


@contextmanager
def _restored(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    parameters = dict(model.named_parameters())
    own = {id(parameter) for parameter in parameters.values()}
    for number, group in enumerate(optimizer.param_groups):
        extra = (p for p in group["params"] if id(p) not in own)
        parameters |= {f"group{number}.{place}": p for place, p in enumerate(extra)}
    rng, buffers = note_rng(), BufferNotes(model)
    notes = buffers.note()
    snapshot = Snapshot(Trainable(parameters=parameters, optimizer=optimizer), device=None)
    gradients = {p: None if p.grad is None else p.grad.clone() for p in parameters.values()}
    tensor_rates = [
        group["lr"].clone() if isinstance(group["lr"], Tensor) else None
        for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        snapshot.restore()
        buffers.restore(notes)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        for group, kept in zip(optimizer.param_groups, tensor_rates, strict=True):
            if kept is not None:
                group["lr"].copy_(kept)
        restore_rng(rng)
