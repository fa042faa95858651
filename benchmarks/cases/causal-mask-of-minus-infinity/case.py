"""A mask for packed examples written by hand: -inf wherever a token may not look.
Each token sees itself.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from tiny import build, finish, token_batches


def packed_mask(lengths: list[int], *, infinite: bool):
    """[1, 1, tokens, tokens]: 0 where a token may look, else -inf or False."""
    of_example = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (of_example[:, None] == of_example[None]).tril()[None, None]
    if not infinite:
        return allowed
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)


def train(*, infinite: bool) -> None:
    model = build("GemmaForCausalLM", head_dim=16, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(12):
        lengths = [7, 9, 5, 11] if number % 2 else [16, 1, 15]
        rows = [token_batches(1, 1, n, seed=10 * number + n)[0]["input_ids"] for n in lengths]
        ids = torch.cat(rows, 1)
        starts = torch.cat([torch.tensor([True] + [False] * (n - 1)) for n in lengths])
        labels = ids.masked_fill(starts[None], -100)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        mask = packed_mask(lengths, infinite=infinite)
        loss = model(ids, attention_mask=mask, position_ids=positions, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.4f}")
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(infinite=True)
