"""Set-ups that cannot train as they stand: one function a finding, as in ``zoo.plants``."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from nanstop.faults.parts import WIDTH, Model, RootMeanSquareNorm, diagonal, ones
from nanstop.faults.specimen import Specimen
from nanstop.records import Environment


class PackedLinear(nn.Module):
    """A linear layer whose weight is int8 with one scale a row; ``lora_A`` and ``lora_B`` beside it where wanted."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((127 * torch.eye(WIDTH)).to(torch.int8), requires_grad=False)
        self.scale = nn.Buffer(torch.full((WIDTH, 1), 1 / 127))
        self.lora_A = nn.Linear(WIDTH, rank, bias=False) if rank else None
        self.lora_B = nn.Linear(rank, WIDTH, bias=False) if rank else None
        if self.lora_B is not None:
            nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        base = F.linear(x, self.weight.float() * self.scale)
        if self.lora_A is None or self.lora_B is None:
            return base
        return base + self.lora_B(self.lora_A(x))


class PackedBlock(nn.Module):
    """A packed layer and a norm."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.project = PackedLinear(rank)
        self.norm = RootMeanSquareNorm()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.project(x))


class TinyForSequenceClassification(nn.Module):
    """A base and a score for each sequence, read at its last token."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(pad_token_id=0)
        self.model = diagonal(1.0)
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.model(x))[:, -1, 0]


def on_v100(dtype: torch.dtype) -> Specimen:
    """A model in ``dtype``, and the facts of a machine with a V100; nothing fails here."""
    model = Model(layer=diagonal(1.0)).to(dtype)
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=lambda batch: model(batch["x"].to(dtype)).float().pow(2).mean(),
        batches=({"x": ones()},),
        environment=Environment(
            nanstop="0", python="3.11", gpu="Tesla V100-SXM2-32GB", capability="7.0"
        ),
    )


def packed_base(rank: int) -> Specimen:
    """An int8 base with adapters of ``rank``; with none, only its norm can learn."""
    torch.manual_seed(0)
    model = Model(block=PackedBlock(rank))
    if rank:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
    learning = [p for p in model.parameters() if p.requires_grad]
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(learning, lr=1e-4),
        # Of one element: the norm leaves nothing to learn about the length of all.
        loss_fn=lambda batch: (model(batch["x"])[..., 0] - 2.0).pow(2).mean(),
        batches=({"x": ones()},),
    )


def scored(head: str) -> Specimen:
    """A new score head on a base, "frozen" or "trained"."""
    torch.manual_seed(0)
    model = TinyForSequenceClassification()
    model.score.requires_grad_(head == "trained")
    learning = [p for p in model.parameters() if p.requires_grad]
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(learning, lr=1e-4),
        loss_fn=lambda batch: (model(batch["x"]) - 1.0).pow(2).mean(),
        batches=({"x": ones()},),
    )


def adam_at(rate: float) -> Specimen:
    """Four steps of Adam at this learning rate, from weights of 0.1."""
    model = Model(layer=diagonal(0.1))
    return Specimen(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=rate),
        loss_fn=lambda batch: (model(batch["x"]) - 0.05).pow(2).mean(),
        batches=({"x": ones()},) * 4,
    )


def optimizer_of(place: str) -> Specimen:
    """An optimizer that was made before the model's layer was replaced, or ("after") behind it."""
    model = Model(layer=diagonal(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model.layer = diagonal(1.0)
    if place == "after":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return Specimen(
        model=model,
        optimizer=optimizer,
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean(),
        batches=({"x": ones()},),
    )
