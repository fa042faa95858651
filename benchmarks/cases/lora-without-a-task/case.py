"""A classifier is adapted with LoRA settings that name no task: its new head is not trained."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import Trainer, TrainingArguments

from tiny import VOCAB, build, quiet_args


def texts(num: int, seed: int = 0) -> list[dict[str, object]]:
    """Three topics with tokens of their own."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        label = number % 3
        ids = 3 + 40 * label + torch.randint(40, (10,), generator=generator)
        made.append({"input_ids": ids.clamp(max=VOCAB - 1).tolist(), "labels": label})
    return made


def train(*, task: TaskType | None) -> None:
    base = build("Qwen3ForSequenceClassification", head_dim=16, num_labels=3)
    torch.manual_seed(1)
    config = LoraConfig(task_type=task, r=4, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, config)
    args = TrainingArguments(**quiet_args(max_steps=16, learning_rate=3e-3))
    Trainer(model=model, args=args, train_dataset=texts(48)).train()
    model.eval()
    fixed = texts(6, seed=1)
    with torch.no_grad():
        loss = model(
            input_ids=torch.tensor([one["input_ids"] for one in fixed]),
            labels=torch.tensor([one["labels"] for one in fixed]),
        ).loss
    print(f"final_loss={float(loss):.6f}")


if __name__ == "__main__":
    train(task=None)
