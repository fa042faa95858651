"""A weighted loss is put together from numbers, and told to require a gradient so that backward
runs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import VOCAB, build

ROWS, LENGTH = 3, 10


def batches(num: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """The answer repeats the question."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        ids = torch.randint(3, 40, (ROWS, LENGTH), generator=generator)
        made.append({"input_ids": ids, "labels": ids})
    return made


def joined(losses: list[Tensor], weights: tuple[float, ...], *, rebuild: bool) -> Tensor:
    if rebuild:
        values = [weight * loss.item() for weight, loss in zip(weights, losses, strict=True)]
        return torch.tensor(values, requires_grad=True).sum()
    return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum()


def train(*, rebuild: bool) -> None:
    model = build(
        "T5ForConditionalGeneration",
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        vocab_size=VOCAB,
    )
    optimizer = torch.optim.Adafactor(model.parameters(), lr=2e-2)
    data = batches(24)
    for step in range(0, len(data), 2):
        losses = [model(**batch).loss for batch in data[step : step + 2]]
        loss = joined(losses, (0.7, 0.3), rebuild=rebuild)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step // 2} loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        print(f"final_loss={float(model(**batches(1, seed=1)[0]).loss):.6f}")


if __name__ == "__main__":
    train(rebuild=True)
