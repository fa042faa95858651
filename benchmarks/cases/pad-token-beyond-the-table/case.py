"""A padding token is added to the tokenizer, and the embedding keeps its size."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import VOCAB, build, finish

ROWS, LENGTH = 3, 14


def batches(num: int, pad: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Rows of one length at first; from the fifth batch on some are shorter and padded."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(num):
        ids = torch.randint(3, VOCAB - LENGTH, (ROWS, 1), generator=generator) + torch.arange(
            LENGTH
        )
        mask = torch.ones_like(ids)
        if number == 9:
            ids[1, 10:], mask[1, 10:] = pad, 0
        made.append(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "labels": ids.masked_fill(mask == 0, -100),
            }
        )
    return made


def train(*, resize: bool) -> None:
    model = build("FalconForCausalLM", num_hidden_layers=2, alibi=False)
    pad = VOCAB  # the tokenizer gave the new token the next free id
    if resize:
        model.resize_token_embeddings(VOCAB + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, batch in enumerate(batches(16, pad)):
        loss = model(**batch).loss / 4
        loss.backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {4 * loss.item():.4f}")
    finish(model, batches(1, pad, seed=1)[0])


if __name__ == "__main__":
    train(resize=False)
