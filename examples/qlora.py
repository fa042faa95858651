"""QLoRA with bitsandbytes in 4 bits, on the CPU too: `nanstop run qlora.py`."""

from tempfile import TemporaryDirectory

import tiny
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

tokenizer = tiny.tokenizer()
nf4 = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
)
with TemporaryDirectory() as folder:  # a model becomes 4-bit while it is loaded
    tiny.model().save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=nf4, device_map={"": "cpu"}
    )
base = prepare_model_for_kbit_training(
    base, gradient_checkpointing_kwargs={"use_reentrant": False}
)
torch.manual_seed(0)
model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out",
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=2e-4,
        logging_steps=3,
        bf16=True,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=[dict(tokenizer(f"{q} {a}<eos>")) for q, a in tiny.SUMS],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
