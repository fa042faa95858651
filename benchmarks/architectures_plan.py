"""The float16 plan of a model, judged from outside:
loss and gradients against float32, and watched training under it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from architectures_trials import Batch, lesson, objective, scaler_of, short
from torch import Tensor, nn

import nanstop

CALIBRATED = 3
"""Batches that the plan is made from: full, padded on the right, padded on the left.
It is judged on the others too.
"""
LOSS_GAP, COSINE = 1e-3, 0.999


@dataclass
class Parity:
    """``loss_gap``: the largest, relative to float32.
    ``cosine``: the smallest, of the whole gradient.

    ``unseen_...``: of batches that the plan was not made from.
    """

    found: bool = False
    reason: str = ""
    regions: int = 0
    logits: str = ""
    loss_gap: float = math.inf
    cosine: float = 0.0
    unseen_loss_gap: float = math.inf
    unseen_cosine: float = 0.0
    trials: int = 0
    seconds: float = 0.0

    @property
    def parity(self) -> bool:
        return self.found and self.loss_gap <= LOSS_GAP and self.cosine >= COSINE

    @property
    def unseen_parity(self) -> bool:
        return self.found and self.unseen_loss_gap <= LOSS_GAP and self.unseen_cosine >= COSINE


def planned(make: Callable[[], nn.Module], seconds: float) -> tuple[Parity, Any]:
    """Return how the plan of a model agrees with float32, and the plan (None where there is
    none).
    """
    try:
        plan = nanstop.plan(make(), lesson()[:CALIBRATED], dtype="float16", seconds=seconds)
    except Exception as error:  # whatever it is, it is this row's
        return Parity(reason=short(error)), None
    record = plan.record
    parity = Parity(
        found=plan.found,
        reason=record.reason,
        regions=len(record.modules),
        logits=record.logits,
        trials=record.calibration.trials,
        seconds=round(record.calibration.seconds, 1),
    )
    if not plan.found:
        return parity, None
    try:
        distances = [_distance(make, plan, batch) for batch in lesson()]
    except Exception as error:  # as above
        parity.reason = short(error)
        return parity, plan
    parity.loss_gap, parity.cosine = _worst(distances[:CALIBRATED])
    parity.unseen_loss_gap, parity.unseen_cosine = _worst(distances[CALIBRATED:])
    return parity, plan


def _worst(distances: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return max(gap for gap, _ in distances), min(cosine for _, cosine in distances)


def _distance(make: Callable[[], nn.Module], plan: Any, batch: Batch) -> tuple[float, float]:
    """Return (relative gap of the loss, cosine of the gradients) between the plan and float32."""
    loss, gradient = _run(make(), batch)
    narrow = make()
    with plan.apply(narrow):
        planned_loss, planned_gradient = _run(narrow, batch, scaler_of(plan).get_scale())
    gap = abs(planned_loss - loss) / max(abs(loss), 1e-12)
    norms = gradient.norm() * planned_gradient.norm()
    cosine = float(gradient @ planned_gradient / norms) if float(norms) else 0.0
    return (gap, cosine) if math.isfinite(gap) and math.isfinite(cosine) else (math.inf, 0.0)


def _run(model: nn.Module, batch: Batch, scale: float = 1.0) -> tuple[float, Tensor]:
    """Return loss and gradient (float64, unscaled, one vector) of a batch."""
    torch.manual_seed(1)
    loss = objective(model)(batch)
    (loss * scale).backward()
    gradients = [
        p.grad.double().flatten() / scale for p in model.parameters() if p.grad is not None
    ]
    return float(loss.detach()), torch.cat(gradients)
