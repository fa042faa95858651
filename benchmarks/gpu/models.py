"""Models of the shapes of Qwen2 and Gemma3, with random weights, and the ways to train them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from gpu.machine import Machine

_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
QWEN2 = {
    "toy": (32, 64, 1, 2, 2, 64),
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
}
GEMMA3 = {
    "toy": (32, 64, 2, 2, 1, 64),
    "0.5B": (896, 4608, 20, 4, 1, 131_072),
    "1B": (1152, 6912, 26, 4, 1, 262_144),
}


def qwen2(size: str, machine: Machine, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return a Qwen2 of a size, on the device; "1.5B" and smaller tie their embeddings."""
    shape = dict(zip(_NAMES, QWEN2[size], strict=True))
    tied = size in ("0.5B", "1.5B")
    config = Qwen2Config(**shape, tie_word_embeddings=tied, pad_token_id=0)
    with born(machine, dtype):
        return Qwen2ForCausalLM(config)


def gemma3(size: str, machine: Machine, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a Gemma3 (text) of a size, on the device."""
    shape = dict(zip(_NAMES, GEMMA3[size], strict=True))
    heads = 16 if size == "toy" else 256
    config = Gemma3TextConfig(**shape, head_dim=heads, sliding_window=512, pad_token_id=0)
    with born(machine, dtype):
        return Gemma3ForCausalLM(config)


def made_trainable(model: PreTrainedModel, how: str, machine: Machine) -> nn.Module:
    """Return a model with what is to be trained of it: all, or LoRA matrices (on 4-bit weights)."""
    if how == "full":
        return model
    from peft import LoraConfig, get_peft_model

    if how.startswith("4-bit"):
        _quantise(model, machine)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM"))


def optimizer_of(model: nn.Module, machine: Machine) -> torch.optim.Optimizer:
    """Return AdamW over what is trained, fused on a GPU."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, fused=machine.has_cuda)


def batch(model: Any, machine: Machine, rows: int, length: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random tokens, the same for the same ``seed``, as inputs and labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (rows, length), generator=generator)
    ids = ids.to(machine.device)
    return {"input_ids": ids, "labels": ids}


@contextmanager
def born(machine: Machine, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(machine.device):
            yield
    finally:
        torch.set_default_dtype(before)


def _quantise(model: PreTrainedModel, machine: Machine) -> None:
    """Replace the linear layers of the decoder by bitsandbytes' NF4."""
    import bitsandbytes as bnb

    layers = [
        (module, name, child)
        for module in model.model.modules()
        for name, child in module.named_children()
        if type(child) is nn.Linear
    ]
    for module, name, child in layers:
        small = bnb.nn.Linear4bit(
            child.in_features,
            child.out_features,
            bias=child.bias is not None,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
        )
        small.weight = bnb.nn.Params4bit(child.weight.data, requires_grad=False)
        small.bias = child.bias
        setattr(module, name, small.to(machine.device))
