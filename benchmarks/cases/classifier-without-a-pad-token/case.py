"""A decoder with a classification head has no padding token and gets batches of two."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import Trainer, TrainingArguments

from tiny import VOCAB, build, quiet_args


def texts(num: int, seed: int = 0) -> list[dict[str, object]]:
    """Two topics with tokens of their own."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        label = number % 2
        ids = 3 + 60 * label + torch.randint(60, (8,), generator=generator)
        made.append({"input_ids": ids.clamp(max=VOCAB - 1).tolist(), "labels": label})
    return made


def train(*, pad: int | None) -> None:
    model = build("LlamaForSequenceClassification", num_labels=2, pad_token_id=pad)
    args = TrainingArguments(**quiet_args(max_steps=6))
    Trainer(model=model, args=args, train_dataset=texts(16)).train()
    model.eval()
    fixed = texts(6, seed=1)
    with torch.no_grad():
        loss = model(
            input_ids=torch.tensor([one["input_ids"] for one in fixed]),
            labels=torch.tensor([one["labels"] for one in fixed]),
        ).loss
    print(f"final_loss={float(loss):.6f}")


if __name__ == "__main__":
    train(pad=None)
