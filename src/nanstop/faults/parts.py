"""The tiny modules and the plain training that specimens are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from nanstop.faults.specimen import Batch, Specimen

WIDTH = 8


def diagonal(value: float, width: int = WIDTH) -> nn.Linear:
    """Return a Linear without bias that multiplies by ``value``."""
    layer = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(width) * value)
    return layer


def ones(rows: int = 4, tokens: int = 6, *, rising: float = 0.0) -> Tensor:
    """Return [rows, tokens, WIDTH] float32, all 1.
    ``rising``: by how much more each token's first element is.

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


class GatedMlp(nn.Module):
    """``down(gate(x) * up(x))``: the product is ``scale`` squared for inputs of 1."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.gate = diagonal(scale)
        self.up = diagonal(scale)
        self.down = diagonal(1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


class RootMeanSquareNorm(nn.Module):
    """RMS normalisation without the usual cast to float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))


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


def half(loss_fn: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
    """Return the loss under float16 autocast of the CPU."""

    def run(batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return loss_fn(batch)

    return run


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``logits`` [rows, tokens, ids] against the next token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trained(
    model: nn.Module,
    loss_fn: Callable[[Batch], Tensor] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float = 1e-4,
    batches: tuple[Batch, ...] = (),
    **more: Any,
) -> Specimen:
    """Return ``model`` in training: by SGD, on the mean square of its answer to ones."""
    return Specimen(
        model=model,
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=lr),
        loss_fn=loss_fn or (lambda batch: model(batch["x"]).pow(2).mean()),
        batches=batches or ({"x": ones()},),
        **more,
    )
