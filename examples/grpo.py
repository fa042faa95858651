"""Reinforcement with TRL's GRPO: `nanstop run grpo.py`. The reward is a function of the answer."""

import tiny
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: object) -> list[float]:
    """Return how much of each completion is letters."""
    return [sum(map(str.isalpha, text)) / max(1, len(text)) for text in completions]


trainer = GRPOTrainer(
    model=tiny.model(),
    reward_funcs=reward,
    args=GRPOConfig(
        output_dir="out",
        max_steps=4,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-5,
        logging_steps=2,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list([{"prompt": question} for question, _ in tiny.SUMS]),
    processing_class=tiny.tokenizer(),
)
trainer.train()
