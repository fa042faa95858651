"""S1: Gemma 3, DPO with LoRA, moved from float32 to mixed float16 (TRL issue 3236)."""

# pyright: reportPrivateImportUsage=false
# (trl offers its names by `__getattr__`)

from __future__ import annotations

from typing import Any

import torch

from nanstop.demo import data, tiny
from nanstop.demo.half import quiet_arguments, trainer_of
from nanstop.demo.scenario import Setup

PLANTED = "model.layers.1.post_feedforward_layernorm"
GAIN = 4e4
MASSIVE = 16
"""Channels, of 64, in which the planted norm's output is massive."""


def massive_gemma3() -> Any:
    """Return a Gemma 3 whose residual stream leaves float16, as that of the published checkpoints
    does.

    Planted: in every fourth channel the weight of one layer's last norm is 4e4, so that its output
    reaches 1e5 (others measured 8e5 in the real model). The norms behind it give those channels no
    weight and restore the size of the others, which is how a trained model lives with such values:
    in float32 it trains as well as any.
    """
    model: Any = tiny.gemma3(
        num_hidden_layers=3, hidden_size=64, intermediate_size=128, head_dim=32
    )
    massive = torch.arange(0, 64, 64 // MASSIVE)
    root_mean_square = GAIN * (MASSIVE / 64) ** 0.5
    behind = model.model.layers[2]
    with torch.no_grad():
        model.get_submodule(PLANTED).weight[massive] = GAIN
        for norm in (behind.input_layernorm, behind.pre_feedforward_layernorm, model.model.norm):
            norm.weight.fill_(root_mean_square)
            norm.weight[massive] = -1.0  # Gemma's norm multiplies by 1 + weight
    return model


def build(setup: Setup) -> Any:
    """Return a DPOTrainer with LoRA on every projection."""
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    settings = quiet_arguments(setup, learning_rate=1e-3, max_length=128)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return trainer_of(setup, DPOTrainer)(
        model=massive_gemma3(),
        args=DPOConfig(**settings),
        train_dataset=data.preferences("train"),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"),
    )
