"""A pure float16 model with a loss scale of its own and a gradient clip written by hand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from tiny import build, finish, token_batches

SCALE = 4096.0


def clip(gradients: list[Tensor], most: float, dtype: torch.dtype) -> None:
    """Scale gradients so that their common norm is at most ``most``."""
    squares = [gradient.to(dtype).pow(2).sum() for gradient in gradients]
    norm = torch.stack(squares).sum().sqrt()
    factor = (most / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)


def train(*, norm_dtype: torch.dtype) -> None:
    model: nn.Module = build(
        "GPT2LMHeadModel", n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0
    )
    model.half()
    masters = [p.detach().float().requires_grad_(True) for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.2, momentum=0.9)
    for step, batch in enumerate(token_batches(24, rows=3)):
        loss = model(**batch).loss
        (loss * SCALE).backward()
        gradients = [p.grad for p in model.parameters()]
        clip(gradients, 1.0 * SCALE, norm_dtype)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float() / SCALE
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        model.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")
    finish(model, token_batches(1, rows=3, seed=1)[0])


if __name__ == "__main__":
    train(norm_dtype=torch.float16)
