"""Fine-tuning with accumulation; the learning rate falls by one notch for each micro-batch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "cases"))

import torch
from transformers import get_linear_schedule_with_warmup

from tiny import finish, qwen2, token_batches

WINDOW, UPDATES = 8, 24


def train(*, each_update: bool) -> None:
    model = qwen2(num_hidden_layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, UPDATES)
    for number, batch in enumerate(token_batches(WINDOW * UPDATES, rows=2), start=1):
        loss = model(**batch).loss / WINDOW
        loss.backward()
        if number % WINDOW == 0:
            optimizer.step()
            optimizer.zero_grad()
            print(f"update {number // WINDOW} loss {WINDOW * loss.item():.4f}")
        if not each_update or number % WINDOW == 0:
            schedule.step()
    finish(model, token_batches(1, rows=4, seed=1)[0])


if __name__ == "__main__":
    train(each_update=False)
