"""Mixed precision with a loss scale that starts high:
the first steps are skipped while the scaler looks for its value.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch

from tiny import build, finish, token_batches


def train(*, init_scale: float) -> None:
    model = build("OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=64, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    for number, batch in enumerate(token_batches(24)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {number} loss {loss.item():.4f} scale {scaler.get_scale():.0f}")
    finish(model, token_batches(1, seed=99)[0])


if __name__ == "__main__":
    train(init_scale=2.0**20)
