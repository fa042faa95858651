"""What a model was made into before its first step.

Packed, adapted, given a head; and which weights can learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.numerics.modules import packed_bits, quantized_layers
from nanstop.numerics.tensors import HALF, format_name, is_inexact
from nanstop.numerics.trained import held_by
from nanstop.records import AdapterFacts, GradientPath, HeadFacts, QuantizedFacts
from nanstop.replay.step import ModelView

_ADAPTERS = (
    "lora_",
    "modules_to_save",
    "prompt_encoder",
    "ia3_",
    "hada_",
    "adaption_",
    "oft_",
    "vera_",
)
_LEARNS_PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "MULTITASK_PROMPT_TUNING")
_CLASSIFIES = ("sequence_classification", "token_classification")
_MOST = 8


def quantized_of(view: ModelView, model: nn.Module) -> QuantizedFacts | None:
    """Return how the base is packed, None where it is not."""
    packed = quantized_layers(view.root) or _with_whole_numbers(view.root)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if not packed and config is None:
        return None
    layers = [view.root.get_submodule(name) for name in packed]
    adapters, head = _adapter_names(view.root), f"{view.head() or ' '}."
    base = [(n, p) for n, p in view.root.named_parameters() if n not in adapters]
    rest = {p.dtype for _, p in base if p.is_floating_point() and not _is_packed(p)}
    half = next((each for each in HALF if each in rest), None)
    return QuantizedFacts(
        method="bitsandbytes" if quantized_layers(view.root) else _method(config),
        bits=_bits(layers, config),
        num_layers=len(layers),
        compute_dtype=_compute_dtype(layers),
        half_rest=format_name(half) if half else None,
        trained_base=tuple(n for n, p in base if p.requires_grad and not n.startswith(head))[
            :_MOST
        ],
        num_adapted=sum(p.requires_grad for n, p in view.root.named_parameters() if n in adapters),
    )


def adapter_of(root: nn.Module) -> AdapterFacts | None:
    """Return what the config of PEFT's active adapter says, None without PEFT."""
    configs = getattr(root, "peft_config", None)
    if not isinstance(configs, Mapping) or not configs:
        return None
    active = getattr(root, "active_adapter", None)
    config = configs.get(active) if isinstance(active, str) else None
    config = config or next(iter(configs.values()))
    rank, alpha = (getattr(config, name, None) for name in ("r", "lora_alpha"))
    return AdapterFacts(
        kind=_word(config.peft_type) or "",
        task_type=_word(getattr(config, "task_type", None)),
        target_modules=_names(getattr(config, "target_modules", None)),
        modules_to_save=_names(getattr(config, "modules_to_save", None)),
        rank=rank if isinstance(rank, int) else None,
        alpha=float(alpha) if isinstance(alpha, (int, float)) else None,
        idle=_idle(root, configs),
    )


def _idle(root: nn.Module, configs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the adapters that are not active; none where it is not known which are."""
    active = getattr(root, "active_adapters", None)
    if not isinstance(active, list) or not active:
        return ()
    return tuple(name for name in configs if name not in active)


def head_of(view: ModelView, model: nn.Module, task: str | None, *, pads: bool) -> HeadFacts | None:
    """Return the head of a classifier, None for other models.

    ``pads``: whether the host knows a padding token.
    """
    name = view.head() if task in _CLASSIFIES else None
    if name is None:
        return None
    known = getattr(getattr(model, "config", None), "pad_token_id", None) is not None
    # Of a head that PEFT saves, the view may name the copy or the one it was made from.
    place = name.split(".modules_to_save.")[0].removesuffix(".original_module")
    parameters = view.root.get_submodule(place).parameters()
    trained = any(parameter.requires_grad for parameter in parameters)
    return HeadFacts(module=name, trained=trained, pads=pads or known or task != _CLASSIFIES[0])


def gradient_path_of(view: ModelView, *, reentrant: bool, will_require: bool) -> GradientPath:
    """Return which trainable elements an update can reach, as far as structure tells.

    ``will_require``: the host makes the embedding's output require gradients when training begins.
    """
    trainable = {id(p): p for p in view.root.parameters() if p.requires_grad}
    updated = [p.numel() for p in held_by(view.optimizer) if id(p) in trainable]
    adapter = adapter_of(view.root)
    asks = reentrant and not (adapter is not None and adapter.kind in _LEARNS_PROMPTS)
    return GradientPath(
        num_trainable=sum(p.numel() for p in trainable.values()),
        num_tensors=len(trainable),
        num_updated=sum(updated) if view.optimizer is not None else None,
        reentrant=reentrant,
        inputs_require_grad=(will_require or _embeds_with_gradient(view)) if asks else None,
    )


def is_reentrant(root: nn.Module) -> bool:
    """Return whether blocks are recomputed by reentrant checkpointing now, as transformers sets
    it up.
    """
    for module in root.modules():
        if getattr(module, "gradient_checkpointing", False):
            function = getattr(module, "_gradient_checkpointing_func", None)
            options = getattr(function, "keywords", {})
            return bool(options.get("use_reentrant", function is not None))
    return False


def _embeds_with_gradient(view: ModelView) -> bool:
    """Return whether the embedding's output requires gradients, by embedding one token.

    Hooks may see to it.
    """
    name = view.embedding()
    table = view.root.get_submodule(name) if name is not None else None
    weight = getattr(table, "weight", None)
    if table is None or not isinstance(weight, Tensor):
        return True  # inputs of another kind
    if weight.requires_grad or getattr(table, "max_norm", None) is not None:
        return True
    ids = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
    try:
        with torch.enable_grad():
            return bool(table(ids).requires_grad)
    except Exception:  # sharded or offloaded: not to be had without the host
        return True


def _own_weight(module: nn.Module) -> Tensor | None:
    """Return what a module holds under that name itself; TorchScript holds it in no dict."""
    return next((p for name, p in module._parameters.items() if name == "weight"), None)


def _with_whole_numbers(root: nn.Module) -> tuple[str, ...]:
    """Return the layers whose own weight is a matrix of integers."""
    weights = ((name, _own_weight(module)) for name, module in root.named_modules())
    return tuple(
        name
        for name, weight in weights
        if weight is not None and weight.dim() == 2 and not is_inexact(weight)
    )


def _adapter_names(root: nn.Module) -> set[str]:
    names = (name for name, _ in root.named_parameters())
    return {name for name in names if any(mark in name for mark in _ADAPTERS)}


def _is_packed(parameter: Tensor) -> bool:
    return hasattr(parameter, "quant_state") or hasattr(parameter, "CB")


def _method(config: Any) -> str:
    found = config.get("quant_method") if isinstance(config, dict) else None
    return _word(found or getattr(config, "quant_method", None)) or "unknown"


def _bits(layers: list[nn.Module], config: Any) -> int:
    packed = {packed_bits(layer) for layer in layers}
    if 8 in packed or getattr(config, "load_in_8bit", False):
        return 8
    if 4 in packed:
        return 4
    bits = getattr(config, "bits", None)
    return (
        bits if isinstance(bits, int) else 8 * max((_bytes(layer) for layer in layers), default=1)
    )


def _bytes(layer: nn.Module) -> int:
    weight = _own_weight(layer)
    return weight.element_size() if weight is not None else 1


def _compute_dtype(layers: list[nn.Module]) -> str | None:
    found = (getattr(layer, "compute_dtype", None) for layer in layers)
    return next((format_name(each) for each in found if isinstance(each, torch.dtype)), None)


def _word(value: Any) -> str | None:
    return str(getattr(value, "value", value)) if value is not None else None


def _names(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(sorted(map(str, value))[: 4 * _MOST])
