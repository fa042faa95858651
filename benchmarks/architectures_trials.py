"""A tiny model of a class, and five healthy steps of training it, watched and not."""

from __future__ import annotations

import inspect
import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from architectures_configs import part_for, tiny_config
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import nanstop

Batch = Mapping[str, Tensor]
Loss = Callable[[Batch], Tensor]

STEPS, ROWS, TOKENS, LR = 5, 2, 12, 1e-3
PADDING, PAD_ID = 4, 0
FIRST_ID, LAST_ID = 3, 100
"""Ids of ordinary tokens: below and above stand special ones."""
TOO_LARGE = 3_000_000
HALF = torch.float16


def build(model_type: str) -> nn.Module:
    """Return the tiny model of a class, in float32 and training mode.
    Raises ``ValueError`` where it is not tiny.
    """
    kind = next(k for k in MODEL_FOR_CAUSAL_LM_MAPPING if k.model_type == model_type)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    config = part_for(tiny_config(kind), architecture.config_class)
    with torch.device("meta"):
        size = sum(p.numel() for p in architecture._from_config(config).parameters())
    if size > TOO_LARGE:
        raise ValueError(f"no tiny configuration: {size} parameters")
    torch.manual_seed(0)
    model = architecture._from_config(config, dtype=torch.float32).train()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all() | tensor.isinf().any()):
            raise ValueError(f"{name} is left uninitialised")
    return model


def batches(count: int = STEPS, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return token batches with the labels of supervised fine-tuning."""
    generator = torch.Generator().manual_seed(seed)
    made = [
        torch.randint(FIRST_ID, LAST_ID, (ROWS, TOKENS), generator=generator) for _ in range(count)
    ]
    return [{"input_ids": ids, "labels": ids} for ids in made]


def padded(batch: Batch, side: str) -> dict[str, Tensor]:
    """Return a batch whose last sample is padded on one side, with its attention mask."""
    mask = torch.ones(ROWS, TOKENS, dtype=torch.long)
    mask[-1, slice(-PADDING, None) if side == "right" else slice(PADDING)] = 0
    return {
        "input_ids": batch["input_ids"].masked_fill(mask == 0, PAD_ID),
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, -100),
    }


def lesson() -> list[dict[str, Tensor]]:
    """Return the batches of the healthy steps:
    full ones, and ones padded on the right and on the left.
    """
    full = batches()
    return [padded(b, ("", "right", "left")[n % 3]) if n % 3 else b for n, b in enumerate(full)]


def objective(model: nn.Module, autocast: torch.dtype | None = None) -> Loss:
    """Return the model's own loss of a batch, under autocast where a format is given."""
    known = inspect.signature(model.forward).parameters
    any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())

    def loss(batch: Batch) -> Tensor:
        taken = {name: value for name, value in batch.items() if any_name or name in known}
        with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
            output = model(**taken)
            if output.loss is not None:
                return output.loss
            logits = output.logits[:, :-1].float().flatten(0, 1)
            return F.cross_entropy(logits, batch["labels"][:, 1:].flatten())

    return loss


FORMS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "float32": (torch.float32, None),
    "bfloat16 weights": (torch.bfloat16, None),
    "bfloat16 autocast": (torch.float32, torch.bfloat16),
    "float16 weights": (HALF, None),
    "float16 autocast": (torch.float32, HALF),
}
"""How a model is run: format of the weights, and of autocast."""


@dataclass
class Health:
    """Five steps, watched and not. ``sick``: why the model fails without nanstop.

    ``same``: whether losses and weights are bitwise those of the unwatched run; None under a loss
    scaler, of which a watch learns at the first update: that one window is scaled after its
    backward. ``overflowed``: steps of the unwatched run whose gradients were not finite; an
    incident at one of them is no false alarm. ``own_chance``: whether two unwatched runs from one
    seed differ.
    """

    form: str
    sick: str = ""
    incidents: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    same: bool | None = True
    overflowed: list[int] = field(default_factory=list)
    own_chance: bool = False


def healthy(make: Callable[[], nn.Module], form: str, plan: Any = None) -> Health:
    """Return what watching five steps of plain training says, and whether it changes losses or
    weights.

    ``plan``: a precision plan (``nanstop.Plan``) that is in force in both trainings.
    """
    weights, autocast = FORMS[form]
    found = Health(form=form if plan is None else "float16 plan")
    try:
        plain = _trained(make().to(weights), autocast, plan, found)
    except Exception as error:  # a model may have no such form
        found.sick = short(error)
        return found
    if not all(map(math.isfinite, plain[0])):
        found.sick = f"losses without nanstop: {plain[0]}"
        return found
    model = make().to(weights)
    standing = {finding.code for finding in nanstop.check(model)}
    with tempfile.TemporaryDirectory() as folder:
        watched = _trained(model, autocast, plan, found, folder)
    found.findings = [line for line in found.findings if line.split()[0] not in standing]
    same = plain[0] == watched[0] and all(map(torch.equal, plain[1], watched[1]))
    if not same and plan is None:
        again = _trained(make().to(weights), autocast, plan, found)
        found.own_chance = plain[0] != again[0]
    found.same = None if scaler_of(plan).is_enabled() or found.own_chance else same
    return found


def _trained(
    model: nn.Module,
    autocast: torch.dtype | None,
    plan: Any,
    found: Health,
    folder: str | None = None,
) -> tuple[list[float], list[Tensor]]:
    """Return losses and weights of five steps, watched where there is a folder for it."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    scaler = scaler_of(plan)
    loss_of, losses = objective(model, autocast), []
    with ExitStack() as inside:
        if plan is not None:
            inside.enter_context(plan.apply(model, optimizer))
        watch = nanstop.watch(model, optimizer, out=folder) if folder else None
        if watch is not None:
            inside.enter_context(watch)
        for batch in lesson():
            if watch is not None:
                losses.append(float(watch.step(loss_of, batch)))
                watch.update(scaler=scaler)
                continue
            loss = loss_of(batch)
            scaler.scale(loss).backward()
            losses.append(float(loss.detach()))
            scaler.unscale_(optimizer)
            if not nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
                found.overflowed.append(len(losses) - 1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    if watch is not None:
        steps = found.overflowed
        alarms = [report for report in watch.incidents if report.incident.at.step not in steps]
        found.incidents = [_incident_line(report) for report in alarms]
        found.findings = [f"{f.code} {f.where} {f.cause}" for f in watch.findings]
    return losses, [p.detach() for p in model.parameters()]


def scaler_of(plan: Any) -> torch.amp.GradScaler:
    """Return the loss scaling that a plan asks for; a disabled scaler where there is none."""
    settings = plan.record.scaler if plan is not None else None
    if settings is None:
        return torch.amp.GradScaler("cpu", enabled=False)
    return torch.amp.GradScaler("cpu", init_scale=settings.init_scale)


def _incident_line(report: Any) -> str:
    place = report.localization
    code = report.diagnoses[0].code if report.diagnoses else "NS000"
    where = f"{place.key.op} in {place.key.module}" if place is not None else "not localized"
    return f"{code} {where}"


def short(error: BaseException) -> str:
    """Return type and message of an exception on one line."""
    message = " ".join(line.strip() for line in str(error).splitlines()).strip()
    return f"{type(error).__name__}: {message[:160]}"
