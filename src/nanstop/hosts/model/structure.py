"""What the structure of a model and its optimizer tells of a run, whoever trains it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanstop.hosts import compat
from nanstop.hosts.model.left_weights import LEFT
from nanstop.hosts.model.optimizer_facts import optimizer_facts
from nanstop.hosts.model.parts import (
    adapter_of,
    gradient_path_of,
    head_of,
    is_reentrant,
    quantized_of,
)
from nanstop.hosts.model.updates import accumulation_of, resumed_state
from nanstop.numerics.modules import named_with_tied, packed_bits, tied_groups
from nanstop.numerics.token_rows import MIN_ROWS, row_blocks, row_norms, token_rows
from nanstop.numerics.weights import odd_weights, param_groups
from nanstop.records import TextFacts, TokenRows
from nanstop.replay.step import ModelView, scale_of

_TASKS = (
    ("ForCausalLM", "causal_lm"),
    ("LMHeadModel", "causal_lm"),
    ("ForSequenceClassification", "sequence_classification"),
    ("ForTokenClassification", "token_classification"),
    ("ForQuestionAnswering", "question_answering"),
    ("ForMaskedLM", "masked_lm"),
    ("ForConditionalGeneration", "seq2seq_lm"),
)
"""How transformers ends the names of its classes. Nothing else tells the task of every model: code
that comes with a checkpoint stands in none of its tables, and the shape of a head fits several.
"""


def structure(
    view: ModelView,
    model: nn.Module,
    *,
    pads: bool = False,
    reentrant: bool = False,
    will_require: bool = False,
    warms_up: bool = False,
) -> dict[str, Any]:
    """Return fields of ``RunFacts``. ``model``: the one that carries the config, under any wrapper.

    ``pads``: the host knows a padding token. ``reentrant``: it will switch on reentrant
    checkpointing, and with ``will_require`` make the embedding's output require gradients for it.
    ``warms_up``: its learning rates rise to those that its schedule multiplies. Reads every weight
    once for its range, embedding and head once more for their rows' norms, and moments of a
    restored optimizer: 0.2 to 0.5 ns an element each, on one core.
    """
    config = getattr(model, "config", None)
    rows, task = _table_rows(view), _task(model)
    reentrant = reentrant or is_reentrant(view.root)
    odd = odd_weights(view.root.named_parameters())
    left = LEFT.here(odd, view.root.named_parameters())
    return {
        "param_groups": param_groups(view.root.named_parameters()),
        "resume": resumed_state(view.optimizer),
        "accumulation": accumulation_of(view.root),
        "scaler": scale_of(view),
        "attention": view.attention(),
        "quantization": _quantization(view),
        "peft": _peft(view.root),
        "task": task,
        "optimizer": optimizer_facts(view.optimizer, view.root, warms_up=warms_up),
        "vocab": getattr(config, "vocab_size", None) or rows,
        "table_rows": rows,
        "token_rows": _token_rows(view, getattr(config, "pad_token_id", None)),
        "model_type": getattr(config, "model_type", None),
        "declared_dtype": compat.declared_dtype(config),
        "gradient_checkpointing": any(
            getattr(module, "gradient_checkpointing", False) for module in view.root.modules()
        ),
        "compiled": any(map(_is_compiled, view.root.modules())),
        "device": view.device_type,
        "quantized": quantized_of(view, model),
        "adapter": adapter_of(view.root),
        "text": _text(config),
        "head": head_of(view, model, task, pads=pads),
        "odd_weights": tuple(stats for stats in odd if stats not in left),
        "left_weights": left,
        "gradient_path": gradient_path_of(view, reentrant=reentrant, will_require=will_require),
    }


def _table_rows(view: ModelView) -> int | None:
    name = view.embedding()
    weight = getattr(view.root.get_submodule(name), "weight", None) if name else None
    return int(weight.shape[0]) if isinstance(weight, Tensor) and weight.dim() == 2 else None


def _quantization(view: ModelView) -> str | None:
    bits = max((packed_bits(module) or 0 for module in view.root.modules()), default=0)
    return f"bitsandbytes-{bits}bit" if bits else None


def _peft(root: nn.Module) -> str | None:
    adapter = adapter_of(root)
    return adapter.kind if adapter is not None else None


def _task(model: nn.Module) -> str | None:
    name = type(model).__name__
    return next((task for ending, task in _TASKS if name.endswith(ending)), None)


def _token_rows(view: ModelView, padding: int | None) -> tuple[TokenRows, ...]:
    """``padding``: the row that the model's config names.

    A table may have one of its own (``padding_idx``).
    """
    found: list[TokenRows] = []
    modules = dict(view.root.named_modules())
    tied = {name for group in tied_groups(view.root) for name in group}
    parameters = dict(named_with_tied(view.root))
    for module in dict.fromkeys(n for n in (view.embedding(), view.head()) if n is not None):
        # An adapter's wrapper (PEFT) holds the table one level down.
        names = (f"{module}.weight", f"{module}.base_layer.weight")
        name = next((n for n in names if n in parameters), names[0])
        weight = parameters.get(name)
        if weight is not None and _is_table(weight):
            norms = torch.cat([row_norms(block) for block in row_blocks(weight)]).cpu()
            found.append(
                token_rows(
                    name,
                    norms,
                    partial(row_blocks, weight),
                    padding=_padding_row(modules.get(name.removesuffix(".weight")), padding),
                    tied=name in tied,
                    trainable=weight.requires_grad,
                )
            )
    return tuple(found)


def _text(config: Any) -> TextFacts | None:
    """Return the tokens that a model's config names, None for a model without a config of texts."""
    if getattr(config, "vocab_size", None) is None:
        return None
    ends = getattr(config, "eos_token_id", None)
    bos, pad = (getattr(config, name, None) for name in ("bos_token_id", "pad_token_id"))
    return TextFacts(
        bos=bos if isinstance(bos, int) else None,
        eos=tuple(ends) if isinstance(ends, list | tuple) else () if ends is None else (int(ends),),
        pad=pad if isinstance(pad, int) else None,
    )


def _is_table(weight: Tensor) -> bool:
    """Return whether a weight is a matrix of numbers that are all here, with rows to compare."""
    # An adapter's or a library's own kind of parameter is as good; what lies on several is not.
    is_whole = weight.device.type != "meta" and not hasattr(weight, "to_local")
    return is_whole and weight.dim() == 2 and weight.is_floating_point() and len(weight) > MIN_ROWS


def _padding_row(table: nn.Module | None, named: int | None) -> int | None:
    own = getattr(table, "padding_idx", None)
    return own if isinstance(own, int) else named


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
