"""Sentence embeddings with in-batch negatives; memory allows one pair at a time, accumulated."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from torch import Tensor
from torch.nn import functional as F

from tiny import build


def pairs(num: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two texts of one subject each: words near the same middle."""
    draw = torch.Generator().manual_seed(seed)
    middle = torch.randint(8, 120, (num, 1), generator=draw)
    first, second = (middle + torch.randint(-5, 6, (num, 10), generator=draw) for _ in range(2))
    return first, second


def ranking_loss(model, first: Tensor, second: Tensor) -> Tensor:
    """Each first text must be nearest to its own second one of the batch."""
    anchors, others = (
        F.normalize(model(input_ids=ids).last_hidden_state.mean(1), dim=-1)
        for ids in (first, second)
    )
    return F.cross_entropy(20.0 * anchors @ others.T, torch.arange(len(first)))


def train(*, size: int) -> None:
    model = build("BertModel", num_hidden_layers=2, hidden_dropout_prob=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(30):
        first, second = pairs(8, seed=step)
        total = 0.0
        for begin in range(0, 8, size):
            part = slice(begin, begin + size)
            loss = ranking_loss(model, first[part], second[part]) * size / 8
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {total:.4f}")
    model.eval()
    with torch.no_grad():
        print(f"final_loss={ranking_loss(model, *pairs(16, seed=1000)).item():.6f}")


if __name__ == "__main__":
    train(size=1)
