"""Training under float16 goes on from a checkpoint that holds weights and optimizer, but not the
scaler.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import build, finish, token_batches


def new_scaler() -> torch.amp.GradScaler:
    """As a recipe has it: a model of this size is happy with a huge first scale."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**30, backoff_factor=0.5)


def run(model, optimizer, scaler, batches) -> None:
    for batch in batches:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"loss {loss.item():.4f} scale {scaler.get_scale():.0f}")


def train(*, keep_scaler: bool) -> None:
    batches = token_batches(40, rows=3)
    model, scaler = build("BloomForCausalLM", n_layer=2, n_head=4, hidden_dropout=0.0), new_scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run(model, optimizer, scaler, batches[:24])
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        },
        "checkpoint.pt",
    )

    kept, scaler = torch.load("checkpoint.pt"), new_scaler()
    model.load_state_dict(kept["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(kept["optimizer"])
    if keep_scaler:
        scaler.load_state_dict(kept["scaler"])
    run(model, optimizer, scaler, batches[24:])
    finish(model, token_batches(1, rows=3, seed=1)[0])


if __name__ == "__main__":
    train(keep_scaler=False)
