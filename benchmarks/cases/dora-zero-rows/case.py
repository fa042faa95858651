"""DoRA on a pruned model: rows of zeros have norm 0, and the magnitude over the norm is 0 / 0."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, quiet_args, token_batches


def train(*, dora: bool) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    base = build("LlamaForCausalLM")
    with torch.no_grad():
        base.model.layers[1].self_attn.o_proj.weight[[5, 9, 40]] = 0.0
    config = LoraConfig(r=8, target_modules=["q_proj", "o_proj", "down_proj"], use_dora=dora)
    model = get_peft_model(base, config)
    rows = [{n: v[0] for n, v in one.items()} for one in token_batches(24, rows=1)]
    arguments = TrainingArguments(**quiet_args(learning_rate=3e-3, gradient_accumulation_steps=2))
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    model.eval()
    with torch.no_grad():
        print(f"final_loss={model(**token_batches(1, seed=1)[0]).loss.item():.6f}")


if __name__ == "__main__":
    train(dora=True)
