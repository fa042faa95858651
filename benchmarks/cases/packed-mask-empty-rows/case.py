"""Packing with an own block mask: padding belongs to no document, so its rows attend to nothing."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor

from tiny import build, finish, token_batches


def block_mask(documents: Tensor, *, alone: bool) -> Tensor:
    """Return the additive mask of packed rows: causal, within a document;
    document -1 is padding.
    """
    same = documents[:, :, None] == documents[:, None, :]
    allowed = same & (documents >= 0)[:, None, :]
    allowed &= torch.ones(same.shape[-2:], dtype=torch.bool).tril()
    if alone:
        allowed |= torch.eye(same.shape[-1], dtype=torch.bool)
    return torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))[:, None]


def packed(num: int, *, alone: bool) -> list[dict[str, Tensor]]:
    """Return rows of three documents each; the row that ends the file is filled up with padding."""
    batches = []
    for number, batch in enumerate(token_batches(num, rows=2, length=24)):
        documents = torch.tensor([0] * 8 + [1] * 10 + [2] * 6).repeat(2, 1)
        labels = batch["labels"].clone()
        if number == 5:
            documents[1, 18:] = -1
            batch["input_ids"][1, 18:] = 0
            labels[1, 18:] = -100
        mask = block_mask(documents, alone=alone)
        batches.append({"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels})
    return batches


def train(*, alone: bool) -> None:
    model = build("LlamaForCausalLM", attn_implementation="eager", num_key_value_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, batch in enumerate(packed(12, alone=alone)):
        loss = model(**batch).loss / 2
        loss.backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss={2 * loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(alone=False)
