"""A head is trained in float16, with the eps that a forum advised:
squares of its gradients are 0.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny import VOCAB, build

ROWS, LENGTH = 4, 12
WEIGHT = 0.001
"""Of this objective among those of a larger training."""


def batches(num: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Tokens, and the share of them that is large."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        ids = torch.randint(3, VOCAB, (ROWS, LENGTH), generator=generator)
        made.append((ids, (ids > VOCAB // 2).float().mean(-1)))
    return made


def train(*, head_dtype: torch.dtype) -> None:
    body = build("ElectraModel", embedding_size=64, hidden_dropout_prob=0.0)
    body.requires_grad_(False).eval()
    torch.manual_seed(2)
    head = nn.Linear(64, 1).to(head_dtype)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-4, eps=1e-6, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=40)
    for step, (ids, share) in enumerate(batches(40)):
        pooled = body(input_ids=ids).last_hidden_state[:, 0].to(head_dtype)
        loss = F.mse_loss(head(pooled).squeeze(-1).float(), share) * WEIGHT
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.6f}")
    ids, share = batches(1, seed=1)[0]
    with torch.no_grad():
        pooled = body(input_ids=ids).last_hidden_state[:, 0]
        print(f"final_loss={float(F.mse_loss(head.float()(pooled).squeeze(-1), share)):.6f}")


if __name__ == "__main__":
    train(head_dtype=torch.float16)
