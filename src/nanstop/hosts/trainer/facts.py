"""Standing facts of a run as records: those of its structure, and those that its host knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from nanstop.detect.rates.schedules import planned
from nanstop.hosts import compat
from nanstop.hosts.model.structure import structure
from nanstop.hosts.model.updates import resumed_from
from nanstop.hosts.sharded.models import can_agree
from nanstop.hosts.trainer.objective import entries_at, reward_models, rewards_at
from nanstop.hosts.trainer.options import (
    group_size,
    objective_of,
    planned_optimizer,
    precision_of,
    schedule_of,
)
from nanstop.hosts.trainer.view import HfView
from nanstop.numerics.tensors import format_name
from nanstop.records import AccumulationFacts, ObjectiveFacts, RateFacts, RunFacts, TextFacts
from nanstop.records.formats import BY_SHORT_NAME

_MASKING = ("assistant_only_loss", "completion_only_loss")
"""Options of TRL that leave tokens out of the loss."""


def facts_of(view: HfView, trainer: Any, *, resumed: str | None = None) -> RunFacts:
    """Return everything that is known of a trainer's run before its first step.

    ``resumed``: from which checkpoint.
    """
    args, model, processor = trainer.args, view.model, _tokenizer(trainer)
    schedule = schedule_of(args, trainer.train_dataset, compat.world_size(trainer))
    known: dict[str, Any] = structure(
        view,
        model,
        pads=getattr(processor, "pad_token_id", None) is not None,
        reentrant=compat.will_recompute_reentrantly(args),
        will_require=compat.will_require_input_grads(args, model),
        warms_up=schedule.warmup_steps > 0,
    )
    if known["optimizer"] is None:
        known["optimizer"] = planned_optimizer(args, model)
    known |= {
        "host": type(trainer).__name__,
        "autocast": _autocast(trainer),
        "loss": _loss(args, model),
        "clip": args.max_grad_norm or None,
        "num_micro": args.gradient_accumulation_steps,
        "accumulation": _divided(trainer, known["accumulation"]),
        "batch_shape": (args.per_device_train_batch_size,),
        "gradient_checkpointing": compat.recomputes(args, model),
        "compiled": bool(known["compiled"] or args.torch_compile or trainer.model is not view.root),
        "nan_inf_filter": bool(args.logging_nan_inf_filter),
        "logging_steps": int(trainer.state.logging_steps or 0),
        "zero_loss_by_design": _zero_loss(args),
        "world_size": compat.world_size(trainer),
        "ranks_agree": can_agree(trainer.model_wrapped),
        "device": args.device.type,
        "padding_side": getattr(processor, "padding_side", None),
        "veto": _veto(trainer),
        "resume": resumed_from(resumed, view.optimizer, scaled=view.scaler is not None),
        "precision": precision_of(args),
        "schedule": schedule,
        "objective": _objective(trainer),
        "text": _text(args, processor, known["text"]),
        "rates": _rates(trainer, schedule.num_steps),
    }
    vocab = _vocab(processor)
    if vocab is not None:
        known["vocab"] = vocab
    return RunFacts(**known)


def _divided(trainer: Any, sums: AccumulationFacts | None) -> AccumulationFacts | None:
    """Return how micro-batches are made one, with whether the trainer divides their losses."""
    if trainer.args.gradient_accumulation_steps == 1 or compat.divides_loss(trainer):
        return sums
    return replace(sums or AccumulationFacts(), by_micros=False)


def _objective(trainer: Any) -> ObjectiveFacts | None:
    found = objective_of(trainer.args)
    models = reward_models(trainer)
    lines = {"rewards_at": rewards_at(trainer), "entries_at": entries_at(trainer)}
    return found and replace(found, **lines, reward_models=models)


def _autocast(trainer: Any) -> str | None:
    """Return autocast's format inside the loss, whether the trainer or accelerate's wrapped
    forward enters it.
    """
    kind = trainer.args.device.type
    with trainer.compute_loss_context_manager():
        if torch.is_autocast_enabled(kind):
            return format_name(torch.get_autocast_dtype(kind))
    if getattr(trainer.accelerator, "native_amp", False):
        return BY_SHORT_NAME.get(trainer.accelerator.mixed_precision)
    return None


def _loss(args: Any, model: nn.Module) -> str | None:
    kind = getattr(args, "loss_type", None) or getattr(model, "loss_type", None)
    return "+".join(map(str, kind)) if isinstance(kind, (list, tuple)) else kind and str(kind)


def _tokenizer(trainer: Any) -> Any:
    """Return the tokenizer, also where a processor holds it, or only what collates the rows; None
    for a trainer without one.
    """
    processor = getattr(trainer, "processing_class", None)
    held = getattr(processor, "tokenizer", processor)
    if held is not None:
        return held
    return getattr(getattr(trainer, "data_collator", None), "tokenizer", None)


def _vocab(tokenizer: Any) -> int | None:
    """Return how many ids the tokenizer can produce, where there is one."""
    try:
        return len(tokenizer)
    except TypeError:
        return None


def _rates(trainer: Any, num_steps: int | None) -> RateFacts | None:
    """Return what a schedule of the user's own will give; those of the options are known."""
    own = trainer.lr_scheduler is not None and not getattr(trainer, "_created_lr_scheduler", False)
    if not own or num_steps is None or compat.world_size(trainer) > 1:
        return None
    return planned(trainer.lr_scheduler, num_steps)


def _text(args: Any, tokenizer: Any, config: TextFacts | None) -> TextFacts | None:
    """Return the tokens as the tokenizer has them, else the config, and where rows are cut."""
    known = config or TextFacts()
    bos, eos, pad = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    return TextFacts(
        bos=bos if isinstance(bos, int) else known.bos,
        eos=tuple({*known.eos, *([eos] if isinstance(eos, int) else [])}),
        pad=pad if isinstance(pad, int) else known.pad,
        most_tokens=None if getattr(args, "packing", False) else _most_tokens(args, tokenizer),
        masking=next((f"{name}=True" for name in _MASKING if getattr(args, name, False)), ""),
    )


def _most_tokens(args: Any, tokenizer: Any) -> int | None:
    """Return the length that a config of TRL cuts rows at, or that the tokenizer was last told to
    cut texts at.
    """
    cuts = getattr(getattr(tokenizer, "_tokenizer", None), "truncation", None)
    told = cuts.get("max_length") if isinstance(cuts, Mapping) else None
    most = getattr(args, "max_length", None) or told
    return most if isinstance(most, int) else None


def _zero_loss(args: Any) -> str | None:
    """Return why GRPO and RLOO log a loss of 0.

    Each group's advantages add up to 0 while the policy is its own.
    """
    if group_size(args) is None or getattr(args, "beta", None) != 0.0:
        return None
    per_generation = getattr(args, "steps_per_generation", None) or 0
    is_off_policy = per_generation > args.gradient_accumulation_steps
    if is_off_policy or getattr(args, "num_iterations", 1) > 1:
        return None
    return (
        "on-policy with beta 0: "
        "advantages of a group add up to 0, and the ratio of the policies is 1"
    )


def _veto(trainer: Any) -> str:
    kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim)).lower()
    if kind == "DEEPSPEED":
        return "DeepSpeed applies the update inside its engine"
    if "lomo" in optimizer or "layerwise" in optimizer:
        return f"{optimizer} updates each weight inside backward"
    return "yes"
