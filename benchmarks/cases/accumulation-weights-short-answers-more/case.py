"""Gradient accumulation averages the means of micro-batches whose answers have 2 to 40 tokens."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import VOCAB, build

MICRO, LENGTH = 4, 48


def batches(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """One row each: of four, three answer in 2 tokens (the same ones, noise), one in 40."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        first = int(torch.randint(3, VOCAB - LENGTH, (1,), generator=generator))
        ids = (first + torch.arange(LENGTH))[None]
        answer = 40 if number % MICRO == 0 else 2
        if answer == 2:
            ids[0, -2:] = torch.randint(3, VOCAB, (2,), generator=generator)
        labels = ids.clone()
        labels[0, :-answer] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def train(*, by_token: bool) -> None:
    model = build("StableLmForCausalLM", num_hidden_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = batches(20 * MICRO)
    for step in range(20):
        window = data[step * MICRO : (step + 1) * MICRO]
        tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in window)
        for batch in window:
            if by_token:
                loss = model(**batch, num_items_in_batch=torch.tensor(tokens)).loss
            else:
                loss = model(**batch).loss / MICRO
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        print(f"final_loss={float(model(**batches(1, seed=1)[0]).loss):.6f}")


if __name__ == "__main__":
    train(by_token=False)
