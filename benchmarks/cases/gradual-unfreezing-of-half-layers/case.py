"""Gradual unfreezing: the head is trained first, then the body, which was loaded in float16 to
save memory.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches

UNFREEZE_AT = 3


def train(*, body: torch.dtype) -> None:
    model = build("Qwen3ForCausalLM", head_dim=16, tie_word_embeddings=False)
    model.model.to(body)
    model.model.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.lm_head.parameters(), lr=3e-3)
    for step, batch in enumerate(token_batches(9, rows=3, length=12)):
        if step == UNFREEZE_AT:
            last = model.model.layers[-1]
            optimizer.add_param_group({"params": list(last.requires_grad_(True).parameters())})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=3, length=12, seed=1)[0])


if __name__ == "__main__":
    train(body=torch.float16)
