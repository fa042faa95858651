"""S5: full fine-tuning of Qwen2 in float16 with eager attention (QwenLM/Qwen3 issue 670)."""

# pyright: reportPrivateImportUsage=false
# (trl offers its names by `__getattr__`)

from __future__ import annotations

from typing import Any

import torch

from nanstop.demo import data, tiny
from nanstop.demo.half import quiet_arguments, trainer_of
from nanstop.demo.scenario import Setup

BIAS = 110.0
FREQUENCIES = 4
"""Of the slowest rotary frequencies, each of two dimensions:
110 * 110 * 8 = 96800, and float16 ends at 65504.
"""


def biased_qwen2(attention: str = "eager") -> Any:
    """Return a Qwen2 whose query and key biases are large, as those of the published checkpoints
    are.

    Planted: in the second layer, in dimensions that hardly rotate, both biases are 110 and nothing
    else enters. The scores of a row then share one huge constant, which the softmax takes away:
    only an unscaled product of query and key that is stored in float16 meets it.
    """
    model: Any = tiny.qwen2(
        attention=attention,
        hidden_size=64,
        intermediate_size=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    attend = model.model.layers[1].self_attn
    half = attend.head_dim // 2
    slow = torch.cat([torch.arange(half - FREQUENCIES, half) + offset for offset in (0, half)])
    with torch.no_grad():
        for projection in (attend.q_proj, attend.k_proj):
            for start in range(0, projection.out_features, attend.head_dim):
                projection.bias[start + slow] = BIAS
                projection.weight[start + slow] = 0.0
    return model


def build(setup: Setup) -> Any:
    """Return an SFTTrainer that trains every weight."""
    from trl import SFTConfig, SFTTrainer

    settings = quiet_arguments(setup, learning_rate=5e-4, max_length=96)
    return trainer_of(setup, SFTTrainer)(
        model=biased_qwen2(),
        args=SFTConfig(**settings),
        train_dataset=data.conversations("train"),
        processing_class=tiny.tokenizer(),
    )
