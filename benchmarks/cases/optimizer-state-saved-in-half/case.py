"""A checkpoint keeps the optimizer state in float16 to save disk; training goes on from it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches


def saved(state: dict, dtype: torch.dtype) -> dict:
    """Return optimizer state as the checkpoint holds it."""
    entries = {
        place: {
            key: value.to(dtype) if key.startswith("exp_avg") else value
            for key, value in entry.items()
        }
        for place, entry in state["state"].items()
    }
    return {"state": entries, "param_groups": state["param_groups"]}


def train(*, dtype: torch.dtype) -> None:
    batches = token_batches(24, rows=3)
    model = build("OlmoForCausalLM")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches[:8]:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(
        {"model": model.state_dict(), "optimizer": saved(optimizer.state_dict(), dtype)},
        "checkpoint.pt",
    )

    kept = torch.load("checkpoint.pt")
    model = build("OlmoForCausalLM", seed=5)
    model.load_state_dict(kept["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(kept["optimizer"])
    for step, batch in enumerate(batches[8:]):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=3, seed=1)[0])


if __name__ == "__main__":
    train(dtype=torch.float16)
