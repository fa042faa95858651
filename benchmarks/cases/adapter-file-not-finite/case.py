"""Training goes on from a LoRA adapter whose file holds Inf."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, quiet_args, token_batches


def save_adapter(folder: str, *, sound: bool) -> None:
    """Write the adapter of an earlier training, which had ended in Inf."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    model = get_peft_model(
        build("GemmaForCausalLM", head_dim=16),
        LoraConfig(r=4, target_modules=["v_proj", "up_proj"]),
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(0.0, 0.01)
            if not sound and "layers.1.mlp.up_proj.lora_B" in name:
                weight[12, 1] = float("inf")
    model.save_pretrained(folder)


def train(*, sound: bool) -> None:
    from peft import PeftModel
    from transformers import Trainer, TrainingArguments

    save_adapter("adapter", sound=sound)
    base = build("GemmaForCausalLM", head_dim=16)
    model = PeftModel.from_pretrained(base, "adapter", is_trainable=True)
    rows = [{n: v[0] for n, v in one.items()} for one in token_batches(16, rows=1)]
    Trainer(model=model, args=TrainingArguments(**quiet_args()), train_dataset=rows).train()
    model.eval()
    with torch.no_grad():
        print(f"final_loss={model(**token_batches(1, seed=1)[0]).loss.item():.6f}")


if __name__ == "__main__":
    train(sound=False)
