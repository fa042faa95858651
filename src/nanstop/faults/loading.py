"""Weights that are wrong before the first step: new rows, old memory, a merge out of range."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from nanstop.faults.parts import WIDTH, TokenModel, diagonal, next_token_loss, trained
from nanstop.faults.specimen import Entry, Specimen, pair, weight_is_bad

_MEMORY = b"nothing wrote here since a line of text was stored, and then some numbers: " * 4


def new_tokens(fill: float | None) -> Specimen:
    """Two tokens were added; their rows are ``fill``, or the mean of the others for None."""
    torch.manual_seed(0)
    model = TokenModel(num_rows=20)
    with torch.no_grad():
        weight = model.embed.weight
        # the mean of random rows is short: give it their length, as trained rows have
        mean = F.normalize(weight[:-2].mean(0), dim=0) * weight[:-2].norm(dim=1).median()
        weight[-2:] = mean if fill is None else torch.full((WIDTH,), fill)
    ids = torch.tensor([[1, 5, 18, 19], [2, 3, 4, 18]])
    return trained(
        model,
        lambda batch: next_token_loss(model(batch["input_ids"]), batch["labels"]),
        batches=({"input_ids": ids, "labels": ids},),
    )


def has_zero_rows(specimen: Specimen) -> bool:
    """Return whether the embedding has a row of zeros."""
    tables = (m for m in specimen.model.modules() if isinstance(m, torch.nn.Embedding))
    return any(bool((table.weight == 0.0).all(-1).any()) for table in tables)


def head_from(memory: bytes | None = None) -> Specimen:
    """Return a head whose weight is these bytes of memory; an initialised one for None."""
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, WIDTH, bias=False)
    if memory is not None:
        bits = torch.frombuffer(bytearray(memory[: 4 * WIDTH * WIDTH]), dtype=torch.float32)
        with torch.no_grad():
            head.weight.copy_(bits.view(WIDTH, WIDTH))
    return trained(nn.Sequential(diagonal(1.0), head), lr=1e-12)


def unfilled_head() -> Specimen:
    """A head that was allocated where text had been."""
    return head_from(_MEMORY)


def has_huge_weight(specimen: Specimen) -> bool:
    """Return whether a parameter is finite and beyond 1e6."""
    ranges = [float(p.detach().abs().max()) for p in specimen.model.parameters()]
    return any(1e6 < largest < math.inf for largest in ranges)


def merged(scaling: float) -> Specimen:
    """``W + scaling * B A``, merged in float16 and stored in float32; B A has elements of 6400."""
    base = diagonal(1.0, WIDTH).weight.half()
    a, b = torch.full((1, WIDTH), 80.0).half(), torch.full((WIDTH, 1), 80.0).half()
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        layer.weight.copy_(base + scaling * (b @ a))
    return trained(nn.Sequential(diagonal(1.0), layer), lr=1e-12)


FAULTS: Mapping[str, Entry] = {
    "NS103": pair(new_tokens, 0.0, None, has_zero_rows, quiet=True),
    "NS105": Entry(unfilled_head, head_from, has_huge_weight),
    "NS106": pair(merged, 16.0, 2.0, weight_is_bad),
}
