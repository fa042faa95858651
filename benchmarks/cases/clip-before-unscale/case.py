"""Gradients are clipped while they still carry the loss scale; the optimizer has plain momentum."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches


def train(*, unscale_first: bool) -> None:
    model = build("GPTNeoXForCausalLM", hidden_dropout=0.0, num_hidden_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
    for number, batch in enumerate(token_batches(24, rows=3)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss / 2).backward()
        if number % 2 == 0:
            continue
        if unscale_first:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=3, seed=1)[0])


if __name__ == "__main__":
    train(unscale_first=False)
