"""The tiny modules that specimens are made of."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


def diagonal(value: float, width: int = WIDTH) -> nn.Linear:
    """Return a Linear without bias that multiplies by ``value``."""
    layer = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width) * value)
    return layer


def ones(rows: int = 4, tokens: int = 6, *, rising: float = 0.0) -> Tensor:
    """Return [rows, tokens, WIDTH] float32, all 1. ``rising``: by how much more each token's first element is.

    Among equal tokens it makes no difference which one is attended to, and no score has a gradient.
    """
    x = torch.ones(rows, tokens, WIDTH)
    x[..., 0] += rising * torch.arange(tokens)
    return x


class Model(nn.Module):
    """A root with one named part, so that the part has a name to be found by."""

    def __init__(self, **part: nn.Module) -> None:
        super().__init__()
        ((self._name, module),) = part.items()
        self.add_module(self._name, module)

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self, self._name)(*inputs)


class HiddenWrite(torch.autograd.Function):
    """The identity, whose backward writes ``poison`` into the gradient through NumPy: no torch op makes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, poison: float) -> Tensor:
        ctx.poison = poison
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        made = gradients[0].clone()
        made.numpy()[0] = ctx.poison
        return made, None


class GatedMlp(nn.Module):
    """``down(gate(x) * up(x))``: the product is ``scale`` squared for inputs of 1."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.gate = diagonal(scale)
        self.up = diagonal(scale)
        self.down = diagonal(1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


class WideFamily(nn.Module):
    """A frozen base in the format ``stored``. ``config`` names a family, as models of transformers do."""

    def __init__(self, model_type: str, declared: torch.dtype, stored: torch.dtype) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=model_type, dtype=declared)
        self.base = GatedMlp(scale=2.0).to(stored).requires_grad_(False)
        self.head = diagonal(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x.to(self.base.up.weight.dtype)).float() + x)


class RootMeanSquareNorm(nn.Module):
    """RMS normalisation without the usual cast to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))


class NormedHead(nn.Module):
    """``head(norm(stretch(x)))``: the norm sees ``scale`` for inputs of 1."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.stretch = diagonal(scale)
        self.norm = RootMeanSquareNorm()
        self.head = diagonal(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stretch(x)))


class EagerAttention(nn.Module):
    """One head of attention in plain operations; hidden keys get a score of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.project = diagonal(1.0)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """``visible``: bool [rows, queries, keys]."""
        query = self.project(x)
        scores = query @ x.transpose(1, 2) / math.sqrt(WIDTH)
        weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
        return weights @ x


class FusedAttention(nn.Module):
    """One head of ``scaled_dot_product_attention`` over queries and keys of ``scale``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.query = diagonal(scale)
        self.key = diagonal(scale)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in (self.query(x), self.key(x), x))
        return nn.functional.scaled_dot_product_attention(query, key, value).squeeze(1)


class TokenModel(nn.Module):
    """Embedding and tied head over ``num_rows`` tokens."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_rows, WIDTH)
        self.head = nn.Linear(WIDTH, num_rows, bias=False)
        self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))
