"""A language model in bfloat16 autocast, entered once, around the whole loop."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

from contextlib import nullcontext

import torch

from tiny import finish, llama, token_batches


def train(*, once: bool) -> None:
    model = llama(num_hidden_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16) if once else nullcontext():
        for step, batch in enumerate(token_batches(40, rows=4)):
            with nullcontext() if once else torch.autocast("cpu", dtype=torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=4, seed=1)[0])


if __name__ == "__main__":
    train(once=True)
