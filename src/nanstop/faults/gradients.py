"""Gradients that leave their format or have no value, and what scaling and clipping do to them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nanstop.diagnose.findings.gradients.ns302_loss_scale_collapse import (
    HEALTHY_SKIPS,
    consecutive_falls,
)
from nanstop.faults.forward import gated_product
from nanstop.faults.parts import WIDTH, Model, diagonal, half, ones, trained
from nanstop.faults.specimen import (
    Batch,
    Entry,
    Specimen,
    gradient_fails,
    gradients_are_zero,
    pair,
    run_plain,
)


def summed_loss(value: float) -> Specimen:
    """The sum over 1024 rows of ``value``: each output is small, their gradient is not."""
    head = nn.Linear(WIDTH, 1, bias=False)
    nn.init.constant_(head.weight, 1e-3)
    model = Model(head=head)
    return trained(
        model,
        half(lambda batch: model(batch["x"]).float().sum()),
        batches=({"x": torch.full((1024, WIDTH), value)},),
        lr=1e-9,
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
    )


def scaled_run(scale: float) -> Specimen:
    """Twelve steps of ``gated_product`` under a GradScaler."""
    one = gated_product(scale)
    return trained(
        one.model,
        one.loss_fn,
        batches=one.batches * 12,
        optimizer=one.optimizer,
        scaler=torch.amp.GradScaler("cpu"),
    )


def scale_collapses(specimen: Specimen) -> bool:
    """Return whether the scaler skips more steps in a row than a healthy start explains."""
    return consecutive_falls(run_plain(specimen).scales) > HEALTHY_SKIPS


def weighted_loss(weight: float) -> Specimen:
    """A mean over 192 numbers in float16, multiplied by ``weight``, without a loss scale."""
    model = Model(layer=diagonal(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            answer = model(batch["x"])
        return answer.float().mean() * weight

    return trained(model, loss_fn)


def distance(gap: float) -> Specimen:
    """The distance between two projections, ``gap`` apart in one row."""
    model = Model(layer=diagonal(1.0))
    left = ones()
    right = left + 1.0
    right[1, 2] = left[1, 2] + gap

    def loss_fn(batch: Batch) -> Tensor:
        apart = model(batch["left"]) - model(batch["right"])
        return apart.pow(2).sum(-1).sqrt().mean()

    return trained(model, loss_fn, batches=({"left": left, "right": right},))


class TwoHeads(nn.Module):
    """Two projections that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.near = diagonal(1.0)
        self.far = diagonal(1.0)

    def forward(self, x: Tensor, gap: Tensor) -> Tensor:
        return self.near(x).pow(2).mean() + self.far(gap).pow(2).sum(-1).sqrt().mean()


def clipped(gap: float) -> Specimen:
    """A distance of ``gap`` in one row beside a healthy head, under clipping."""
    model = TwoHeads()
    apart = ones()
    apart[1, 2] = gap
    return trained(
        model,
        lambda batch: model(batch["x"], batch["gap"]),
        batches=({"x": ones(), "gap": apart},),
        clip=1.0,
    )


def clipping_destroys(specimen: Specimen) -> bool:
    """Return whether clipping makes a gradient zero or NaN that was neither."""
    specimen.loss_fn(specimen.batches[0]).backward()
    gradients = [p.grad for p in specimen.model.parameters() if p.grad is not None]
    healthy = [g for g in gradients if bool(g.isfinite().all()) and bool(g.any())]
    torch.nn.utils.clip_grad_norm_(specimen.model.parameters(), specimen.clip or math.inf)
    return any(not bool(g.any()) or bool(g.isnan().any()) for g in healthy)


class Kept(torch.optim.SGD):
    """Calls that are meant to clear gradients do not, or do."""

    def __init__(self, model: nn.Module, *, clears: bool) -> None:
        super().__init__(model.parameters(), lr=1e-4)
        self.clears = clears

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.clears:
            super().zero_grad(set_to_none)


def updated_without(clearing: str) -> Specimen:
    """Five updates; "no" clearing of gradients between them, or "every" time."""
    model = Model(layer=diagonal(0.5))
    return trained(
        model, batches=({"x": ones()},) * 5, optimizer=Kept(model, clears=clearing == "every")
    )


def gradients_add_up(specimen: Specimen) -> bool:
    """Return whether the gradients of the last update are those of several backwards."""
    run = run_plain(specimen)
    (weight,) = specimen.model.parameters()
    (last,) = torch.autograd.grad(specimen.loss_fn(specimen.batches[-1]), weight)
    return run.largest_gradient > 2.0 * float(last.abs().max())


def limited(clip: float) -> Specimen:
    """Five updates, their gradients clipped to a norm of ``clip``."""
    return trained(Model(layer=diagonal(0.5)), batches=({"x": ones()},) * 5, clip=clip)


def nothing_moves(specimen: Specimen) -> bool:
    """Return whether updates move no weight by 1e-12, and a backward has gradients."""
    (weight,) = specimen.model.parameters()
    before = weight.detach().clone()
    run_plain(specimen)
    (after,) = torch.autograd.grad(specimen.loss_fn(specimen.batches[-1]), weight)
    return float((weight.detach() - before).abs().max()) < 1e-12 and bool(after.any())


FAULTS: Mapping[str, Entry] = {
    "NS301": pair(summed_loss, 100.0, 1.0, gradient_fails),
    "NS302": pair(scaled_run, 300.0, 3.0, scale_collapses),
    "NS303": pair(weighted_loss, 1e-7, 1.0, gradients_are_zero, quiet=True),
    "NS304": pair(distance, 0.0, 0.5, gradient_fails),
    "NS305": pair(clipped, 0.0, 0.5, clipping_destroys),
    "NS306": pair(updated_without, "no", "every", gradients_add_up, quiet=True),
    "NS307": pair(limited, 1e-12, 1.0, nothing_moves, quiet=True),
}
