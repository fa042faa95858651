"""Weights that are wrong before the first step: plants of NS105 and NS106."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanstop.faults.parts import WIDTH, diagonal, ones
from nanstop.faults.specimen import Batch, Specimen

_MEMORY = b"nothing wrote here since a line of text was stored, and then some numbers: " * 4


def head_from(memory: bytes | None = None) -> Specimen:
    """A head whose weight is memory as it was; initialised for None."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WIDTH, bias=False)
    if memory is not None:
        bits = torch.frombuffer(bytearray(memory[: 4 * WIDTH * WIDTH]), dtype=torch.float32)
        with torch.no_grad():
            head.weight.copy_(bits.view(WIDTH, WIDTH))
    return _trained(head)


def unfilled_head() -> Specimen:
    """A head that was allocated where text had been."""
    return head_from(_MEMORY)


def merged(scaling: float) -> Specimen:
    """``W + scaling * B A``, merged in float16 and stored in float32; B A has elements of 6400."""
    base = diagonal(1.0, WIDTH).weight.half()
    a, b = torch.full((1, WIDTH), 80.0).half(), torch.full((WIDTH, 1), 80.0).half()
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        layer.weight.copy_(base + scaling * (b @ a))
    return _trained(layer)


def _trained(layer: nn.Linear) -> Specimen:
    model = nn.Sequential(diagonal(1.0), layer)

    def loss_fn(batch: Batch) -> Tensor:
        return model(batch["x"]).pow(2).mean()

    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-12),
        loss_fn=loss_fn,
        batches=({"x": ones()},),
    )
