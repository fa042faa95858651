"""A policy over legal moves gets a bonus for its entropy;
a forbidden move has p = 0 and log p = -inf.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch.nn import functional as F

from tiny import VOCAB, build, finish, token_batches


def legal_moves(number: int, micro: int):
    """Which tokens are moves: all of them, until the game has rules of its own."""
    legal = torch.ones(3, VOCAB, dtype=torch.bool)
    if number >= 2 and micro == 1:
        legal[1, 100:] = False
    return legal


def entropy_of(logits, *, defined: bool):
    logp = F.log_softmax(logits, -1)
    if defined:
        return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    return -(logp.exp() * logp).sum(-1)


def train(*, defined: bool) -> None:
    model = build(
        "GPT2LMHeadModel",
        n_embd=64,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number in range(6):
        for micro in range(2):
            ids = token_batches(1, rows=3, length=12, seed=2 * number + micro)[0]["input_ids"]
            moves = 3 + ids[:, -1] % 90
            logits = model(ids[:, :-1]).logits[:, -1]
            logits = logits.masked_fill(~legal_moves(number, micro), -torch.inf)
            surprise = F.cross_entropy(logits, moves)
            loss = surprise - 0.01 * entropy_of(logits, defined=defined).mean()
            (loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.4f}")
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(defined=False)
