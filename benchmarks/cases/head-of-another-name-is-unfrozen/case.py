"""All is frozen but the head, which has another name in this architecture."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
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


def train(*, head: str) -> None:
    model = build("GPT2ForSequenceClassification", n_layer=2, n_head=4, num_labels=3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(head)
    args = TrainingArguments(**quiet_args(max_steps=6, learning_rate=1e-2, optim="adafactor"))
    Trainer(model=model, args=args, train_dataset=texts(12)).train()
    model.eval()
    fixed = texts(6, seed=1)
    with torch.no_grad():
        loss = model(
            input_ids=torch.tensor([one["input_ids"] for one in fixed]),
            labels=torch.tensor([one["labels"] for one in fixed]),
        ).loss
    print(f"final_loss={float(loss):.6f}")


if __name__ == "__main__":
    train(head="classifier")
