"""A planted fault or its twin: a tiny training in plain torch, and what a plain run shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanstop.records import Environment

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Specimen:
    """``loss_fn(batch)`` calls ``model`` and returns a scalar; one batch is one optimizer step.

    ``environment``: of a machine that this one is not.
    """

    model: nn.Module
    optimizer: Optimizer
    loss_fn: Callable[[Batch], Tensor]
    batches: tuple[Batch, ...]
    scaler: torch.amp.GradScaler | None = None
    clip: float | None = None
    environment: Environment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """What a run without nanstop shows.
    Names are those of the model's parameters, at the first step that has any.

    ``scales``: of the GradScaler, before the first step and after each.
    The last two numbers are of the last step.
    """

    losses: tuple[float, ...]
    bad_gradients: tuple[str, ...]
    broken: tuple[str, ...]
    """Parameters that an update with finite gradients made non-finite."""
    scales: tuple[float, ...]
    num_nonzero_gradients: int
    largest_gradient: float
    error: str

    @property
    def healthy(self) -> bool:
        """Nothing failed: losses, gradients and weights stayed finite and nothing was raised."""
        finite = all(math.isfinite(loss) for loss in self.losses)
        return finite and not (self.bad_gradients or self.broken or self.error)


def run_plain(specimen: Specimen) -> PlainRun:
    """Train on every batch once, without nanstop, and return what there was to see. In place."""
    losses: list[float] = []
    scales = [_scale(specimen)]
    bad_gradients: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    num_nonzero, largest, error = 0, 0.0, ""
    for batch in specimen.batches:
        specimen.optimizer.zero_grad()
        try:
            loss = specimen.loss_fn(batch)
        except (IndexError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
            break
        losses.append(loss.item())
        _scaled(specimen, loss).backward()
        bad_gradients = bad_gradients or _bad(specimen.model, gradients=True)
        grads = [p.grad for p in specimen.model.parameters() if p.grad is not None]
        num_nonzero = sum(int(grad.count_nonzero()) for grad in grads)
        largest = max((float(grad.abs().max()) for grad in grads), default=0.0)
        was_finite = not _bad(specimen.model) and not bad_gradients
        _update(specimen)
        if was_finite:
            broken = _bad(specimen.model)
        scales.append(_scale(specimen))
    return PlainRun(
        losses=tuple(losses),
        bad_gradients=bad_gradients,
        broken=broken,
        scales=tuple(scales),
        num_nonzero_gradients=num_nonzero,
        largest_gradient=largest,
        error=error,
    )


def _scaled(specimen: Specimen, loss: Tensor) -> Tensor:
    return loss if specimen.scaler is None else specimen.scaler.scale(loss)


def _update(specimen: Specimen) -> None:
    if specimen.clip is not None:
        torch.nn.utils.clip_grad_norm_(specimen.model.parameters(), specimen.clip)
    if specimen.scaler is None:
        specimen.optimizer.step()
    else:
        specimen.scaler.step(specimen.optimizer)
        specimen.scaler.update()


def _scale(specimen: Specimen) -> float:
    return 1.0 if specimen.scaler is None else specimen.scaler.get_scale()


def _bad(model: nn.Module, *, gradients: bool = False) -> tuple[str, ...]:
    return tuple(
        name
        for name, parameter in model.named_parameters()
        if (value := parameter.grad if gradients else parameter) is not None
        and not bool(value.isfinite().all())
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """``sign(specimen)`` is True for the fault and False for the twin; it may train the specimen.

    ``quiet``: the fault leaves every number of a plain run finite.
    """

    fault: Callable[[], Specimen]
    healthy: Callable[[], Specimen]
    sign: Callable[[Specimen], bool]
    quiet: bool = False


def pair(
    plant: Callable[..., Specimen],
    fault: object,
    healthy: object,
    sign: Callable[[Specimen], bool],
    *,
    quiet: bool = False,
) -> Entry:
    """Return what ``plant`` builds of either argument, and how to tell them apart."""
    return Entry(partial(plant, fault), partial(plant, healthy), sign, quiet)


def loss_fails(specimen: Specimen) -> bool:
    """Return whether a loss is not finite."""
    return any(not math.isfinite(loss) for loss in run_plain(specimen).losses)


def gradient_fails(specimen: Specimen) -> bool:
    """Return whether a gradient is not finite although every loss is."""
    run = run_plain(specimen)
    return bool(run.bad_gradients) and all(math.isfinite(loss) for loss in run.losses)


def gradients_are_zero(specimen: Specimen) -> bool:
    """Return whether every gradient is exactly 0 and the loss is not."""
    run = run_plain(specimen)
    return run.num_nonzero_gradients == 0 and any(run.losses)


def weight_is_bad(specimen: Specimen) -> bool:
    """Return whether a parameter is not finite before the first step."""
    return any(not bool(p.isfinite().all()) for p in specimen.model.parameters())


def update_breaks(specimen: Specimen) -> bool:
    """Return whether an update with finite gradients made a parameter non-finite."""
    return bool(run_plain(specimen).broken)
