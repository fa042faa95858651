"""One batch of many is of another kind:
its loss is ten times that of its neighbours, once, and training goes on.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from tiny import VOCAB, build, finish, token_batches


def train(*, hard_at: int | None) -> None:
    model = build("Qwen3ForCausalLM", head_dim=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = torch.Generator().manual_seed(5)
    for number in range(60):
        batch = token_batches(1, rows=4, seed=number)[0]
        if number == hard_at:
            batch["input_ids"] = torch.randint(3, VOCAB, (4, 16), generator=draw)
            batch["labels"] = batch["input_ids"]
        loss = model(**batch).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 0:
            print(f"step {number} loss {loss.item():.4f} norm {norm.item():.2f}")
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(hard_at=44)
