"""The seed configurations as a user's script:
``seed_training.py NAME [cured]``; models are tiny, classes the real ones.
"""

import sys

import torch
from peft import LoraConfig
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

from nanstop.demo import data, qlora, tiny
from nanstop.demo.dpo import massive_gemma3
from nanstop.demo.sft import biased_qwen2

torch.set_num_threads(1)
QUIET = {
    "output_dir": "out",
    "max_steps": 20,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "per_device_train_batch_size": 4,
}


def gemma3_dpo(cured):
    """S1, TRL issue 3236."""
    return DPOTrainer(
        model=massive_gemma3(),
        args=DPOConfig(**QUIET, fp16=not cured, bf16=cured, learning_rate=1e-5, max_length=128),
        train_dataset=data.preferences("train"),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )


def gemma_qlora(cured, *, new_rows="mean", half=False):
    """S2, PEFT issue 1715."""
    tokenizer = qlora.extended_tokenizer()
    model = qlora.with_lora(
        qlora.quantised_gemma(
            len(tokenizer), new_rows="mean" if cured else new_rows, compute=torch.bfloat16
        ),
        rank=4,
        half=half and not cured,
    )
    settings = QUIET | {"gradient_checkpointing": True, "learning_rate": 2e-4}
    settings |= {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    return Trainer(
        model=model,
        args=TrainingArguments(**settings, bf16=True, optim="paged_adamw_8bit", max_grad_norm=0.3),
        train_dataset=qlora.examples(tokenizer, tag_first=True),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def num_words(completions, **_):
    return [float(len(each[0]["content"].split())) for each in completions]


def qwen2_grpo(_cured):
    """S3, TRL issue 2906: the fault and its cure are those of the machine."""
    settings = {"learning_rate": 5e-6, "max_grad_norm": 0.1, "warmup_steps": 1, "adam_beta2": 0.99}
    settings |= {"num_generations": 4, "max_completion_length": 16}
    return GRPOTrainer(
        model=tiny.qwen2(),
        reward_funcs=num_words,
        args=GRPOConfig(**QUIET, **settings, bf16=True),
        train_dataset=data.preferences("train").select_columns(["prompt"]),
        processing_class=tiny.tokenizer(),
    )


def qwen2_reward(cured):
    """S4, TRL issue 2367."""
    model = tiny.qwen2_reward()
    settings = QUIET | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 32}
    return RewardTrainer(
        model=model if cured else model.half(),
        args=RewardConfig(**settings, bf16=cured, learning_rate=1e-4, max_length=64),
        train_dataset=data.preferences("train"),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(
            r=8,
            target_modules=["q_proj", "v_proj"],
            task_type="SEQ_CLS",
            modules_to_save=["score"],
        ),
    )


def qwen2_sft(cured):
    """S5, QwenLM/Qwen3 issue 670: the cure is another attention kernel, still in float16."""
    return SFTTrainer(
        model=biased_qwen2("sdpa" if cured else "eager"),
        args=SFTConfig(**QUIET, fp16=True, learning_rate=1e-5, max_length=96),
        train_dataset=data.conversations("train"),
        processing_class=tiny.tokenizer(),
    )


SEEDS = {
    "gemma3-dpo": gemma3_dpo,
    "gemma-qlora-zero-rows": lambda cured: gemma_qlora(cured, new_rows="zero"),
    "gemma-qlora-half-trainables": lambda cured: gemma_qlora(cured, half=True),
    "qwen2-grpo": qwen2_grpo,
    "qwen2-reward": qwen2_reward,
    "qwen2-sft": qwen2_sft,
}

if __name__ == "__main__":
    trainer = SEEDS[sys.argv[1]]("cured" in sys.argv[2:])
    trainer.train()
    trainer.save_model("trained")
