"""Preference tuning with TRL and LoRA: `nanstop run dpo.py`."""

import tiny
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

rows = [
    {"prompt": question, "chosen": f" {answer}", "rejected": " I do not know."}
    for question, answer in tiny.SUMS
]
trainer = DPOTrainer(
    model=tiny.model(),
    args=DPOConfig(
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
    peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"),
)
trainer.train()
