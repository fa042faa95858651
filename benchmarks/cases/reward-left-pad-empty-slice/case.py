"""A reward model compares the answers from where they differ to where they end, as if padding
stood on the right.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import nn
from torch.nn import functional as F

from tiny import PAD, VOCAB, build, finish, token_batches


def pair(seed: int, lengths: tuple[int, int]):
    """Chosen and rejected ids [2, 16], padded on the left."""
    draw = torch.Generator().manual_seed(seed)
    first = int(torch.randint(3, 100, (1,), generator=draw))
    rows = torch.full((2, 16), PAD)
    for row, length in enumerate(lengths):
        answer = torch.arange(first + 4, first + length)
        if row:
            answer = torch.randint(3, VOCAB, (length - 4,), generator=draw)
        rows[row, 16 - length :] = torch.cat([torch.arange(first, first + 4), answer])
    return rows


def span(rows, padding_side: str) -> slice:
    first = int((rows[0] != rows[1]).nonzero()[0])
    if padding_side == "left":
        return slice(first, rows.shape[1])
    ends = [int((row == PAD).nonzero()[0]) if (row == PAD).any() else len(row) for row in rows]
    return slice(first, max(ends))


def train(*, padding_side: str) -> None:
    model = build("BloomForCausalLM", n_layer=2, n_head=4)
    score = nn.Linear(64, 1, bias=False)
    optimizer = torch.optim.AdamW([*model.parameters(), *score.parameters()], lr=1e-3)
    for number in range(8):
        for micro in range(2):
            odd = number == 1 and micro == 1
            rows = pair(10 * number + micro, (12, 12) if odd else (16, 13))
            seen = (rows != PAD).long()
            out = model(rows, attention_mask=seen, output_hidden_states=True)
            rewards = score(out.hidden_states[-1]).squeeze(-1)
            compared = span(rows, padding_side)
            good, bad = rewards[0, compared], rewards[1, compared]
            answer = F.cross_entropy(out.logits[0, 4:-1], rows[0, 5:], ignore_index=PAD)
            loss = (-F.logsigmoid(good - bad).mean() + answer) / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {2 * loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(padding_side="right")
