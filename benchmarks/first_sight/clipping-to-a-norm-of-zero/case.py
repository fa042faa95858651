"""Clipping is meant to be switched off by a limit of 0, as several programs have it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from accelerate import Accelerator

from tiny import build, finish, token_batches


def train(*, limit: float) -> None:
    accelerator = Accelerator(cpu=True)
    model = build("GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step, batch in enumerate(token_batches(40, rows=4)):
        loss = model(**batch).loss
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f}")
    finish(accelerator.unwrap_model(model), token_batches(1, rows=4, seed=1)[0])


if __name__ == "__main__":
    train(limit=0.0)
