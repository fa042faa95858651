"""The loss is scaled for float16, and the optimizer steps without the scaler."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches


def train(*, through_scaler: bool) -> None:
    model = build("GPTNeoForCausalLM", attention_types=[[["global"], 3]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for step, batch in enumerate(token_batches(16, rows=3)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        if through_scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=3, seed=1)[0])


if __name__ == "__main__":
    train(through_scaler=False)
