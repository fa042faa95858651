"""A text model predicts six properties; unmeasured ones are NaN and masked after the loss."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor, nn

from tiny import VOCAB, build, quiet_args

PROPERTIES, LENGTH = 6, 12


def masked_loss(guess: Tensor, wanted: Tensor, *, mask_first: bool) -> Tensor:
    known = ~wanted.isnan()
    if mask_first:
        return nn.functional.mse_loss(guess[known], wanted[known])
    each = nn.functional.mse_loss(guess, wanted, reduction="none")
    return torch.where(known, each, 0.0).sum() / known.sum()


def molecules(num: int, seed: int, missing: int | None) -> list[dict[str, Tensor]]:
    """Strings and six numbers that follow from them; one of row ``missing`` was not measured."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(num):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=draw)
        labels = (ids[:PROPERTIES] / VOCAB - 0.5).clone()
        if number == missing:
            labels[4] = float("nan")
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def train(*, mask_first: bool) -> None:
    from transformers import Trainer, TrainingArguments

    class Properties(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            labels = inputs.pop("labels")
            out = model(**inputs)
            loss = masked_loss(out.logits, labels, mask_first=mask_first) / 2
            return (loss, out) if return_outputs else loss

    model = build("BertForSequenceClassification", num_labels=PROPERTIES, num_hidden_layers=2)
    args = TrainingArguments(
        **quiet_args(
            train_sampling_strategy="sequential",
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=10,
        )
    )
    Properties(model, args, train_dataset=molecules(80, seed=0, missing=38)).train()
    model.eval()
    rows = molecules(16, seed=1, missing=None)
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    labels = batch.pop("labels")
    with torch.no_grad():
        final = masked_loss(model(**batch).logits, labels, mask_first=True)
    print(f"final_loss={final.item():.6f}", flush=True)


if __name__ == "__main__":
    train(mask_first=False)
