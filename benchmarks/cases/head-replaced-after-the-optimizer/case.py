"""A linear probe: a new head is put on a frozen model whose optimizer has been built already."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from tiny import VOCAB, build

CLASSES, ROWS, LENGTH = 3, 6, 10


def batches(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Three topics with tokens of their own."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        labels = torch.arange(ROWS) % CLASSES
        ids = 3 + 40 * labels[:, None] + torch.randint(40, (ROWS, LENGTH), generator=generator)
        made.append({"input_ids": ids.clamp(max=VOCAB - 1), "labels": labels})
    return made


def train(*, head_first: bool) -> None:
    model = build("Gemma2ForSequenceClassification", head_dim=16, num_labels=CLASSES)
    model.model.requires_grad_(False)
    torch.manual_seed(3)
    head = nn.Linear(64, CLASSES, bias=False)
    if head_first:
        model.score = head
    optimizer = torch.optim.RMSprop(model.score.parameters(), lr=1e-2)
    if not head_first:
        model.score = head
    for step, batch in enumerate(batches(40)):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        print(f"final_loss={float(model(**batches(1, seed=1)[0]).loss):.6f}")


if __name__ == "__main__":
    train(head_first=False)
