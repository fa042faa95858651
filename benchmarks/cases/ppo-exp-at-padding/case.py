"""The ratio of padded tokens is infinite and set aside after the exponential:
the loss is finite, its gradient is not.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tiny import PAD, build, finish, token_batches

NEVER = -200.0
"""What the rollout store writes where there was no token."""


def rollout(model, number: int):
    lengths = (12, 12, 12, 12) if number % 4 != 3 else (12, 7, 12, 9)
    full = token_batches(1, rows=4, length=16, seed=number)[0]["input_ids"]
    rows = [row[: 4 + length] for row, length in zip(full, lengths, strict=True)]
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
    with torch.no_grad():
        old = logps_of(model, ids)
    kept = [row[:length] for row, length in zip(old, lengths, strict=True)]
    return ids, pad_sequence(kept, batch_first=True, padding_value=NEVER)


def logps_of(model, ids):
    logits = model(ids, attention_mask=(ids != PAD).long()).logits[:, 3:-1]
    return -F.cross_entropy(logits.transpose(1, 2), ids[:, 4:], reduction="none")


def train(*, mask_first: bool) -> None:
    model = build("StableLmForCausalLM")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(6):
        ids, old = rollout(model, number)
        seen = ids[:, 4:] != PAD
        advantages = torch.tensor([1.0, -0.5, 1.0, -0.5])[:, None]
        for _ in range(2):
            log_ratio = logps_of(model, ids) - old
            if mask_first:
                log_ratio = torch.where(seen, log_ratio, 0.0)
            ratio = torch.exp(log_ratio)
            gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            loss = -torch.where(seen, gain, 0.0).sum() / seen.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"batch {number} loss {loss.item():.4f}")
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(mask_first=False)
