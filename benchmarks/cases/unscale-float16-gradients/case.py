"""A model loaded in float16 is trained with a loss scaler, which refuses to unscale its
gradients.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches


def train(*, dtype: torch.dtype) -> None:
    model = build("GPT2LMHeadModel", n_inner=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model.to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    for number, batch in enumerate(token_batches(16, length=24)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss / 2
        scaler.scale(loss).backward()
        if number % 2 == 0:
            continue
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"{2 * loss.item():.4f}")
    finish(model, token_batches(1, length=24, seed=1)[0])


if __name__ == "__main__":
    train(dtype=torch.float16)
