"""A bias that is made with torch.empty and never filled:
deterministic mode fills such memory with NaN.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor, nn

from tiny import build, finish, token_batches


class Router(nn.Module):
    """Weighs two feed-forward networks of a layer for each token."""

    def __init__(self, inner: nn.Module, width: int, *, filled: bool) -> None:
        super().__init__()
        self.first, self.second = inner, type(inner)(inner.config)
        self.gate = nn.Parameter(torch.randn(width, 2) * 0.02)
        self.bias = nn.Parameter(torch.zeros(2) if filled else torch.empty(2))

    def forward(self, hidden: Tensor) -> Tensor:
        shares = torch.softmax(hidden @ self.gate + self.bias, -1)
        return shares[..., :1] * self.first(hidden) + shares[..., 1:] * self.second(hidden)


def train(*, filled: bool) -> None:
    torch.use_deterministic_algorithms(True)
    model = build("MistralForCausalLM")
    layer = model.model.layers[1]
    layer.mlp = Router(layer.mlp, 64, filled=filled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in token_batches(8):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss={loss.item():.4f}")
    finish(model, token_batches(1, seed=1)[0])


if __name__ == "__main__":
    train(filled=False)
