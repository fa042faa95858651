"""Supervised fine-tuning with TRL: `nanstop run sft.py`, or with one line in it."""

import tiny
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import nanstop

rows = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in tiny.SUMS
]
trainer = SFTTrainer(
    model=tiny.model(),
    args=SFTConfig(
        output_dir="out",
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        max_length=64,
        logging_steps=4,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=Dataset.from_dict({"messages": rows}),
    processing_class=tiny.tokenizer(),
)
nanstop.watch(trainer)  # not needed under `nanstop run`, and harmless there
trainer.train()
