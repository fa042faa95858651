"""A contrastive loss on the distance of two sentence embeddings;
some pairs are the same text twice.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import VOCAB, build

PAIRS, LENGTH, MARGIN = 4, 10, 1.0


def batches(num: int, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ids of two texts, and whether they mean the same."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        left = torch.randint(3, VOCAB, (PAIRS, LENGTH), generator=generator)
        same = torch.arange(PAIRS) % 2 == 0
        right = torch.where(same[:, None], left.flip(1), left.roll(1, 0))
        if number % 5 == 3:
            right[2] = left[2]  # a duplicate of the crawl
        made.append((left, right, same.float()))
    return made


def distance(left: Tensor, right: Tensor, eps: float) -> Tensor:
    return ((left - right).pow(2).sum(-1) + eps).sqrt()


def train(*, eps: float) -> None:
    model = build(
        "DistilBertModel",
        dim=64,
        hidden_dim=128,
        n_heads=4,
        n_layers=2,
        dropout=0.0,
        attention_dropout=0.0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(left: Tensor, right: Tensor, same: Tensor) -> Tensor:
        first = model(input_ids=left).last_hidden_state.mean(1)
        second = model(input_ids=right).last_hidden_state.mean(1)
        apart = distance(first, second, eps)
        return (same * apart.square() + (1 - same) * (MARGIN - apart).relu().square()).mean()

    for step, batch in enumerate(batches(10)):
        loss = loss_of(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    with torch.no_grad():
        print(f"final_loss={float(loss_of(*batches(1, seed=1)[0])):.6f}")


if __name__ == "__main__":
    train(eps=0.0)
