"""A policy is scored on left-padded answers with positions from the mask, and trained with
positions that count padding.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import PAD, build, finish, token_batches


def logps_of(model, ids, positions):
    logits = model(ids, attention_mask=(ids != PAD).long(), position_ids=positions).logits
    return -F.cross_entropy(logits[:, 11:-1].transpose(1, 2), ids[:, 12:], reduction="none")


def of_the_mask(ids):
    return ((ids != PAD).long().cumsum(1) - 1).clamp(min=0)


def train(*, same_positions: bool) -> None:
    model = build(
        "GPT2LMHeadModel",
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        initializer_range=0.2,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for number in range(12):
        ids = token_batches(1, rows=4, length=20, seed=number)[0]["input_ids"]
        for row, padding in enumerate((0, 4, 7, 9)):
            ids[row, :padding] = PAD
        ids[1::2, 12:] = ids[1::2, 12:].flip(1)
        advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
        positions = of_the_mask(ids)
        with torch.no_grad():
            old_logps = logps_of(model, ids, positions)
        if not same_positions:
            positions = torch.arange(20).expand(4, -1)
        for _ in range(2):
            ratio = torch.exp(logps_of(model, ids, positions) - old_logps)
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -gain.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"loss {loss.item():.4f} ratio {ratio.min().item():.3f} {ratio.max().item():.3f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(same_positions=False)
