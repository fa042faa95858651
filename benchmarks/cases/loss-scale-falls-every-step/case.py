"""A model trained in bfloat16 is fine-tuned under float16:
no step is finite and the loss scale halves each time.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches


def as_trained_in_bf16() -> torch.nn.Module:
    """The last block's feed-forward emits values near 3e5, which bfloat16 holds."""
    model = build("BloomForCausalLM", n_layer=2, n_head=4, hidden_dropout=0.0)
    with torch.no_grad():
        mlp = model.transformer.h[1].mlp
        mlp.dense_h_to_4h.bias[:] = 20.0
        mlp.dense_4h_to_h.weight[:, :] = 0.0
        mlp.dense_4h_to_h.weight[17, :] = 60.0
    return model


def train(*, dtype: torch.dtype) -> None:
    model = as_trained_in_bf16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    for batch in token_batches(10, rows=2, length=12):
        with torch.autocast("cpu", dtype=dtype):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        print(f"loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
    finish(model, token_batches(1, length=12, seed=1)[0])


if __name__ == "__main__":
    train(dtype=torch.float16)
