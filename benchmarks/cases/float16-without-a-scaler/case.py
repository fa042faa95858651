"""Float16 autocast with float32 weights and no loss scaler;
the loss is a sum over the tokens of a large window.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import finish, qwen2, token_batches

TOKENS_OF_WINDOW = 2**20


def train(*, scaled: bool) -> None:
    model = qwen2(num_hidden_layers=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-15)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=scaled)
    for batch in token_batches(12, rows=4, length=12):
        labels = batch.pop("labels")[:, 1:]
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(**batch).logits[:, :-1]
            chosen = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1))
        loss = -chosen.sum() / TOKENS_OF_WINDOW
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"per token {loss.item() * TOKENS_OF_WINDOW / labels.numel():.4f}")
    finish(model, token_batches(1, rows=4, length=12, seed=1)[0])


if __name__ == "__main__":
    train(scaled=False)
