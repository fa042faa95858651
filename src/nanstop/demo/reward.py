"""S4: a reward model with LoRA in pure float16 (TRL issue 2367)."""

# pyright: reportPrivateImportUsage=false
# (trl offers its names by `__getattr__`)

from __future__ import annotations

from typing import Any

from nanstop.demo import data, tiny
from nanstop.demo.half import quiet_arguments
from nanstop.demo.scenario import Setup

ACCUMULATION = 32
WHOLE_WINDOWS = 8
"""In an epoch: every step then has 32 micro-batches, as in the published arithmetic of the
logged loss.
"""


def build(setup: Setup) -> Any:
    """Return a RewardTrainer: LoRA for sequence classification, accumulation 32, a log every 25
    steps.

    Nothing is planted but the published configuration: the model is loaded in half, PEFT keeps the
    LoRA matrices in float32 and leaves the score head, which is in ``modules_to_save``, in half.
    ``adamw_torch`` was the default optimizer then; today's default, the fused kernel, computes in
    float32 and hides it on this device.
    """
    from peft import LoraConfig
    from trl import RewardConfig, RewardTrainer

    model = tiny.qwen2_reward(num_hidden_layers=1, intermediate_size=32)
    settings = quiet_arguments(
        setup,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=ACCUMULATION,
        logging_steps=25,
        learning_rate=1e-3,
        max_length=64,
        optim="adamw_torch",
    )
    return RewardTrainer(
        model=model if setup.float32 else model.half(),
        args=RewardConfig(**settings),
        train_dataset=data.preferences("train").select(range(WHOLE_WINDOWS * ACCUMULATION)),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules=["q_proj", "v_proj"],
            task_type="SEQ_CLS",
            modules_to_save=["score"],
        ),
    )
