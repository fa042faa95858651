"""Standing facts of a trainer, and the facts of a batch, as records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.adapters import _compat
from nanstop.adapters.hf_view import HfView
from nanstop.records import OptimizerFacts, ParamGroup, RunFacts, TokenRows

_FAR = 8.0
"""A row whose norm is this many times the median, or its inverse, was not trained with the others."""
_MAX_ROWS = 64
_TASKS = (
    ("ForCausalLM", "causal_lm"),
    ("LMHeadModel", "causal_lm"),
    ("ForSequenceClassification", "sequence_classification"),
    ("ForTokenClassification", "token_classification"),
    ("ForQuestionAnswering", "question_answering"),
    ("ForMaskedLM", "masked_lm"),
    ("ForConditionalGeneration", "seq2seq_lm"),
)


def facts_of(view: HfView, trainer: Any) -> RunFacts:
    """Return everything that is known of the run before its first step.

    Reads embedding and head once for their rows' norms; otherwise nothing of the size of the model.
    """
    args, model = trainer.args, view.model
    config = getattr(model, "config", None)
    embedding = dict(view.root.named_modules()).get(view.embedding() or "")
    weight = getattr(embedding, "weight", None)
    scaler = view.scaler
    return RunFacts(
        host=type(trainer).__name__,
        param_groups=_param_groups(view.root),
        autocast=_autocast(trainer),
        scaler=float(scaler.get_scale()) if scaler is not None else None,
        attention=view.attention(),
        quantization=_quantization(view),
        peft=_peft(view.root),
        task=_task(model),
        loss=_loss(args, model),
        optimizer=_optimizer(view.optimizer),
        clip=args.max_grad_norm or None,
        num_micro=args.gradient_accumulation_steps,
        batch_shape=(args.per_device_train_batch_size,),
        vocab=_vocab(trainer, config),
        table_rows=int(weight.shape[0])
        if isinstance(weight, Tensor) and weight.dim() == 2
        else None,
        token_rows=_token_rows(view, getattr(config, "pad_token_id", None)),
        model_type=getattr(config, "model_type", None),
        declared_dtype=_compat.declared_dtype(config),
        gradient_checkpointing=_compat.recomputes(args, model),
        compiled=bool(args.torch_compile or trainer.model is not view.root),
        nan_inf_filter=bool(args.logging_nan_inf_filter),
        logging_steps=int(trainer.state.logging_steps or 0),
        zero_loss_by_design=_zero_loss(args),
        world_size=_compat.world_size(trainer),
        device=args.device.type,
        veto=_veto(trainer, view),
    )


def _param_groups(root: nn.Module) -> tuple[ParamGroup, ...]:
    groups: dict[tuple[str, bool], list[tuple[str, Tensor]]] = {}
    for name, parameter in root.named_parameters():
        key = str(parameter.dtype).removeprefix("torch."), parameter.requires_grad
        groups.setdefault(key, []).append((name, parameter))
    return tuple(
        ParamGroup(
            dtype=dtype,
            trainable=trainable,
            num_tensors=len(members),
            num_elements=sum(p.numel() for _, p in members),
            examples=tuple(name for name, _ in members[:4]),
        )
        for (dtype, trainable), members in groups.items()
    )


def _autocast(trainer: Any) -> str | None:
    """Return autocast's format inside the loss, whether the trainer or accelerate's wrapped forward enters it."""
    kind = trainer.args.device.type
    with trainer.compute_loss_context_manager():
        if torch.is_autocast_enabled(kind):
            return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    if getattr(trainer.accelerator, "native_amp", False):
        formats = {"fp16": "float16", "bf16": "bfloat16"}
        return formats.get(trainer.accelerator.mixed_precision)
    return None


def _quantization(view: HfView) -> str | None:
    names = set(view.quantized_layers())
    kinds = {type(m).__name__ for n, m in view.root.named_modules() if n in names}
    if not kinds:
        return None
    return "bitsandbytes-8bit" if any("8bit" in kind for kind in kinds) else "bitsandbytes-4bit"


def _peft(root: nn.Module) -> str | None:
    configs = getattr(root, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return None
    kind = next(iter(configs.values())).peft_type
    return str(getattr(kind, "value", kind))


def _task(model: nn.Module) -> str | None:
    name = type(model).__name__
    return next((task for ending, task in _TASKS if name.endswith(ending)), None)


def _loss(args: Any, model: nn.Module) -> str | None:
    kind = getattr(args, "loss_type", None) or getattr(model, "loss_type", None)
    return "+".join(map(str, kind)) if isinstance(kind, (list, tuple)) else kind and str(kind)


def _optimizer(optimizer: torch.optim.Optimizer | None) -> OptimizerFacts | None:
    if optimizer is None:
        return None
    group = optimizer.param_groups[0]
    name = type(optimizer).__name__
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    betas = group.get("betas")
    return OptimizerFacts(
        name=name,
        lr=float(group["lr"]),
        eps=_number(group.get("eps")),
        betas=(float(betas[0]), float(betas[1])) if betas else None,
        weight_decay=_number(group.get("weight_decay")),
        state_bits=8 if bits == 8 or "8bit" in name else None,
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _vocab(trainer: Any, config: Any) -> int | None:
    """Return how many ids the tokenizer can produce, or what the config says where there is no tokenizer."""
    processor = getattr(trainer, "processing_class", None)
    tokenizer = getattr(processor, "tokenizer", processor)
    try:
        return len(tokenizer)
    except TypeError:
        size = getattr(config, "vocab_size", None)
        return int(size) if size is not None else None


def _token_rows(view: HfView, padding: int | None) -> tuple[TokenRows, ...]:
    found: list[TokenRows] = []
    tied = {name for group in view.tied_groups() for name in group}
    parameters = dict(view.root.named_parameters(remove_duplicate=False))
    for module in dict.fromkeys(n for n in (view.embedding(), view.head()) if n is not None):
        name = f"{module}.weight"
        weight = parameters.get(name)
        usable = weight is not None and weight.dim() == 2 and weight.is_floating_point()
        if usable and weight.device.type != "meta" and weight.shape[0] > 8:
            found.append(_rows(name, weight, padding, tied=name in tied))
    return tuple(found)


def _rows(name: str, weight: Tensor, padding: int | None, *, tied: bool) -> TokenRows:
    norms = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32).cpu()
    usual = norms[norms.isfinite() & (norms > 0)]
    median = float(usual.median()) if usual.numel() else 0.0
    zero = norms == 0
    if padding is not None and 0 <= padding < len(zero):
        zero[padding] = False  # torch.nn.Embedding keeps the padding row at zero by design
    far = ((norms > _FAR * median) | (norms < median / _FAR) | norms.isnan()) & (norms != 0)
    return TokenRows(
        parameter=name,
        num_rows=weight.shape[0],
        zero_rows=tuple(zero.nonzero().flatten().tolist()[:_MAX_ROWS]),
        outlier_rows=tuple(far.nonzero().flatten().tolist()[:_MAX_ROWS]),
        median_norm=median,
        tied=tied,
        trainable=weight.requires_grad,
    )


def _zero_loss(args: Any) -> str | None:
    """Return why GRPO and RLOO log a loss of 0: each group's advantages add up to 0 while the policy is its own."""
    if not hasattr(args, "num_generations") or getattr(args, "beta", None) != 0.0:
        return None
    if args.num_iterations > 1 or args.steps_per_generation > args.gradient_accumulation_steps:
        return None
    return "on-policy with beta 0: advantages of a group add up to 0, and the ratio of the policies is 1"


def _veto(trainer: Any, view: HfView) -> str:
    kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim)).lower()
    if kind == "DEEPSPEED":
        return "DeepSpeed applies the update inside its engine"
    if "lomo" in optimizer or "layerwise" in optimizer:
        return f"{optimizer} updates each weight inside backward"
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for p in view.root.parameters()):
        return "a hook after gradient accumulation may update weights inside backward"
    return "yes"
