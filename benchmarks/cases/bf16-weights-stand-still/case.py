"""Full fine-tuning in pure bfloat16 at a small learning rate: the updates are rounded away."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches


def train(*, dtype: torch.dtype) -> None:
    model = build("GemmaForCausalLM", head_dim=16, num_key_value_heads=1).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0)
    batch = token_batches(1, rows=4)[0]
    for step in range(12):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.5f}")
    finish(model, batch)


if __name__ == "__main__":
    train(dtype=torch.bfloat16)
