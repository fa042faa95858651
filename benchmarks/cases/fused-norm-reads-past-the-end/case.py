"""A fused RMS norm works on blocks of 8 rows and leaves the last, incomplete block unwritten."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from tiny import build, finish, token_batches

BLOCK = 8


@torch.library.custom_op("fusednorm::rms", mutates_args=())
def rms(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.full_like(rows, torch.nan)  # what memory happens to hold
    whole = len(rows) // BLOCK * BLOCK
    done = rows[:whole]
    out[:whole] = done * torch.rsqrt(done.square().mean(-1, keepdim=True) + eps) * weight
    return out


def keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    rows, weight, ctx.eps = inputs
    ctx.save_for_backward(rows, weight)


def gradients(ctx, grad):  # type: ignore[no-untyped-def]
    with torch.enable_grad():
        rows, weight = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        out = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + ctx.eps) * weight
    return *torch.autograd.grad(out, (rows, weight), grad), None


rms.register_autograd(gradients, setup_context=keep)


class FusedNorm(nn.Module):
    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, hidden: Tensor) -> Tensor:
        return rms(hidden.flatten(0, -2), self.weight, self.eps).view_as(hidden)


def train(*, fused: bool) -> None:
    model = build("MistralForCausalLM")
    if fused:
        for layer in model.model.layers:
            old = layer.post_attention_layernorm
            layer.post_attention_layernorm = FusedNorm(old.weight, old.variance_epsilon)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = token_batches(5) + token_batches(1, rows=1, length=13, seed=4) + token_batches(3)
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(fused=True)
