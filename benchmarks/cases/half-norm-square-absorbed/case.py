"""A hand-written RMS norm squares in float16:
the square of one channel is Inf, its inverse root 0, the layer silent.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from tiny import finish, qwen2, token_batches


class FastNorm(torch.nn.Module):
    """An RMS norm without the cast to float32 that the library's has."""

    def __init__(self, weight: torch.nn.Parameter, *, compute: torch.dtype) -> None:
        super().__init__()
        self.weight = weight
        self.compute = compute

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        narrow = hidden.to(self.compute)
        spread = narrow.square().mean(-1, keepdim=True)
        return self.weight * (narrow * torch.rsqrt(spread + 1e-6))


def train(*, compute: torch.dtype) -> None:
    model = qwen2()
    with torch.no_grad():
        model.model.embed_tokens.weight *= 40.0
        model.model.embed_tokens.weight[:, 40] = 300.0
        model.model.norm.weight[:] = 30.0
        model.model.norm.weight[40] = 0.0
    for layer in model.model.layers:
        weight = layer.post_attention_layernorm.weight
        weight.data[:] = 30.0
        weight.data[40] = 0.0
        layer.post_attention_layernorm = FastNorm(weight, compute=compute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for batch in token_batches(10):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(compute=torch.float16)
