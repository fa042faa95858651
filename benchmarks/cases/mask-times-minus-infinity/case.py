"""An additive mask made by multiplying: 0 times -Inf is NaN wherever a token may be seen."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import build

ROWS = 4


def additive(mask: Tensor, *, filled: bool) -> Tensor:
    """Return the mask [rows, 1, length, length] that is added to the scores of attention."""
    hidden = (1 - mask)[:, None, None, :].expand(-1, 1, mask.shape[1], -1).float()
    if filled:
        return torch.zeros_like(hidden).masked_fill(hidden.bool(), float("-inf"))
    return hidden * float("-inf")


def reviews(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Return texts of two classes; from the fourth batch on they are of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for number in range(num):
        labels = torch.randint(0, 2, (ROWS,), generator=generator)
        ids = torch.randint(3, 60, (ROWS, 12), generator=generator) + 60 * labels[:, None]
        mask = torch.ones_like(ids)
        if number >= 3:
            mask[1, 8:] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def classified(model: torch.nn.Module, batch: dict[str, Tensor], *, filled: bool) -> Tensor:
    """Return the loss of a batch; a mask is made only where texts differ in length."""
    mask = batch["attention_mask"]
    added = None if bool(mask.all()) else additive(mask, filled=filled)
    return model(batch["input_ids"], attention_mask=added, labels=batch["labels"]).loss


def train(*, filled: bool) -> None:
    model = build("BertForSequenceClassification", num_labels=2, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for batch in reviews(10):
        loss = classified(model, batch, filled=filled)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        last = classified(model, reviews(1, seed=1)[0], filled=True)
    print(f"final_loss={last.item():.6f}")


if __name__ == "__main__":
    train(filled=False)
