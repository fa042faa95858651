"""A reward model with TRL: `nanstop run reward.py`."""

import tiny
import torch
from datasets import Dataset
from transformers import LlamaForSequenceClassification
from trl import RewardConfig, RewardTrainer

torch.manual_seed(0)
rows = [
    {"prompt": question, "chosen": f" {answer}", "rejected": " I do not know."}
    for question, answer in tiny.SUMS
]
trainer = RewardTrainer(
    model=LlamaForSequenceClassification(tiny.config(num_labels=1)),
    args=RewardConfig(
        output_dir="out",
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        max_length=64,
        logging_steps=3,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tiny.tokenizer(),
)
trainer.train()
