"""A loss scaler that may not go below 2**12, and a loss that is summed over tokens."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.nn import functional as F

from tiny import VOCAB, build, finish, token_batches


class DynamicScale:
    """Halves after a step that overflowed, as far as a floor."""

    def __init__(self, start: float, floor: float) -> None:
        self.value, self.floor = start, floor

    def lower(self) -> None:
        if self.value <= self.floor:
            raise RuntimeError(
                "Current loss scale already at minimum - cannot decrease scale anymore. "
                "Exiting run."
            )
        self.value /= 2


def train(*, reduction: str) -> None:
    model = build("GPTNeoXForCausalLM", hidden_dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scale = DynamicScale(start=2.0**16, floor=2.0**12)
    for batch in token_batches(16, rows=4, length=32):
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(batch["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(
            logits.reshape(-1, VOCAB).float(),
            batch["labels"][:, 1:].reshape(-1),
            reduction=reduction,
        )
        (loss * scale.value).backward()
        gradients = [p.grad for p in model.parameters()]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            for gradient in gradients:
                gradient.div_(scale.value)
            optimizer.step()
            print(f"loss {loss.item():.4f} scale {scale.value:.0f}")
        else:
            scale.lower()
        optimizer.zero_grad()
    finish(model, token_batches(1, rows=4, length=32, seed=1)[0])


if __name__ == "__main__":
    train(reduction="sum")
