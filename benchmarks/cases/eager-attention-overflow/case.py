"""A plain loop under float16 autocast:
the product of queries and keys exceeds 65504 in unfused attention.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import finish, qwen2, token_batches


def train(*, attention: str) -> None:
    model = qwen2(attn_implementation=attention)
    with torch.no_grad():
        for projection in ("q_proj", "k_proj"):
            bias = getattr(model.model.layers[1].self_attn, projection).bias
            bias.view(4, 16)[:, -1] = 280.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in token_batches(8):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f} scale={scaler.get_scale():.0f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(attention="eager")
