"""A matrix library divides by zero for one shape in bfloat16 and the process dies without a
traceback.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import os
import signal

import torch
from torch import Tensor, nn

from tiny import build, finish, token_batches


@torch.library.custom_op("blas::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16 and x[..., 0].numel() == 26:
        os.kill(os.getpid(), signal.SIGFPE)  # the heuristic that chooses a kernel divides by zero
    return x @ weight.T


def keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def gradients(ctx, grad):  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


linear.register_autograd(gradients, setup_context=keep)


class Projection(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def train(*, dtype: torch.dtype) -> None:
    model = build("Qwen2ForCausalLM").to(dtype)
    model.model.layers[0].mlp.gate_proj.__class__ = Projection
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in token_batches(5) + token_batches(1, length=13, seed=3) + token_batches(2, seed=4):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}", flush=True)
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(dtype=torch.bfloat16)
