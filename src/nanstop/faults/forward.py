"""Forward passes that leave their format, or ask for what is not defined."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nanstop.faults.parts import (
    WIDTH,
    GatedMlp,
    Model,
    RootMeanSquareNorm,
    diagonal,
    half,
    ones,
    trained,
)
from nanstop.faults.specimen import Batch, Entry, Specimen, loss_fails, pair

NUM_POSITIONS = 320


def gated_product(scale: float) -> Specimen:
    """``gate(x) * up(x)`` of ``scale`` squared under float16 autocast."""
    model = Model(mlp=GatedMlp(scale))
    return trained(
        model,
        half(lambda batch: model(batch["x"]).float().pow(2).mean()),
        lr=1e-6,
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
    )


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


def masked_row(num_visible: int) -> Specimen:
    """One query of the second row sees ``num_visible`` keys."""
    torch.manual_seed(0)
    model = Model(attention=EagerAttention())
    visible = torch.ones(4, 6, 6).tril().bool()
    visible[1, 2] = False
    visible[1, 2, :num_visible] = True
    return trained(
        model,
        lambda batch: model(batch["x"], batch["visible"]).pow(2).mean(),
        batches=({"x": torch.randn(4, 6, WIDTH), "visible": visible},),
    )


class MaskedAttention(nn.Module):
    """One head of attention that adds masks of the lowest number; ``combine`` makes one of two."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.project = diagonal(1.0)
        self.combine = combine

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """``padding``: bool [rows, tokens]; padded tokens neither ask nor answer."""
        scores = self.project(x) @ x.transpose(1, 2) / math.sqrt(WIDTH)
        hidden = padding * torch.finfo(x.dtype).min
        mask = self.combine(hidden[:, :, None], hidden[:, None, :])
        return torch.softmax(scores + mask, dim=-1) @ x


def added_masks(combine: Callable[[Tensor, Tensor], Tensor]) -> Specimen:
    """The second sample is padding only; ``combine`` joins the masks of queries and of keys."""
    torch.manual_seed(0)
    model = Model(attention=MaskedAttention(combine))
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[1] = True
    return trained(
        model,
        lambda batch: model(batch["x"], batch["padding"]).pow(2).mean(),
        batches=({"x": torch.randn(4, 6, WIDTH), "padding": padding},),
    )


def logarithm(value: float) -> Specimen:
    """The logarithm of ``value``, straight from a linear layer."""
    model = Model(layer=diagonal(1.0))
    x = ones()
    x[1, 2] = value
    return trained(
        model, lambda batch: torch.log(model(batch["x"]).sum(-1)).mean(), batches=({"x": x},)
    )


def kept_mean(num_kept: int) -> Specimen:
    """The mean over the first ``num_kept`` rows, as a sum over a count."""
    model = Model(layer=diagonal(1.0))

    def loss_fn(batch: Batch) -> Tensor:
        kept = batch["kept"].float()
        return (model(batch["x"]).pow(2).mean((1, 2)) * kept).sum() / kept.sum()

    return trained(model, loss_fn, batches=({"x": ones(), "kept": torch.arange(4) < num_kept},))


def unit_rows(value: float) -> Specimen:
    """Rows divided by their norm; one row is all ``value``."""
    model = Model(layer=diagonal(1.0))
    x = ones()
    x[1, 2] = value

    def loss_fn(batch: Batch) -> Tensor:
        rows = model(batch["x"])
        return (rows / rows.norm(dim=-1, keepdim=True)).pow(2)[..., 0].mean()

    return trained(model, loss_fn, batches=({"x": x},))


def log_ratio(value: float) -> Specimen:
    """The exponential of a log-ratio that reaches ``value``."""
    model = Model(layer=diagonal(1.0))
    x = ones()
    x[1, 2] = value
    return trained(model, lambda batch: torch.exp(model(batch["x"])).mean(), batches=({"x": x},))


class Positions(nn.Module):
    """Adds the cosines of positions that are counted in ``counted`` to a layer's answer."""

    def __init__(self, counted: torch.dtype) -> None:
        super().__init__()
        self.counted = counted
        self.layer = diagonal(1.0)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).to(self.counted)
        frequencies = torch.logspace(0, -2, WIDTH, device=x.device).to(self.counted)
        return self.layer(x) + torch.cos(positions[:, None] * frequencies).to(x.dtype)


def counted_positions(counted: torch.dtype) -> Specimen:
    """A float32 model that counts 320 positions in ``counted``."""
    model = Model(rotary=Positions(counted))
    return trained(model, batches=({"x": ones(rows=1, tokens=NUM_POSITIONS)},))


def positions_collide(specimen: Specimen) -> bool:
    """Return whether the model answers the same at two positions that have the same input."""
    (answer,) = specimen.model(specimen.batches[0]["x"])
    return answer.unique(dim=0).shape[0] < answer.shape[0]


class NormedHead(nn.Module):
    """``head(norm(stretch(x)))``: the norm sees ``scale`` for inputs of 1."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.stretch = diagonal(scale)
        self.norm = RootMeanSquareNorm()
        self.head = diagonal(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stretch(x)))


def normalisation(scale: float) -> Specimen:
    """RMS normalisation of ``scale`` under float16 autocast; its answer should not depend on it."""
    model = NormedHead(scale)
    return trained(
        model,
        half(lambda batch: (model(batch["x"]).float() - 1.0).pow(2).mean()),
        lr=1e-6,
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
    )


def is_bent(specimen: Specimen) -> bool:
    """Return whether the loss is finite and off the float64 one by more than 5 %."""
    batch = specimen.batches[0]
    seen = specimen.loss_fn(batch).item()
    specimen.model.double()  # autocast leaves float64 alone
    true = specimen.loss_fn({name: value.double() for name, value in batch.items()}).item()
    return math.isfinite(seen) and abs(seen - true) > 0.05 * abs(true)


FAULTS: Mapping[str, Entry] = {
    "NS201": pair(gated_product, 300.0, 3.0, loss_fails),
    "NS202": pair(masked_row, 0, 1, loss_fails),
    "NS203": pair(added_masks, torch.add, torch.minimum, loss_fails),
    "NS204": pair(logarithm, -1.0, 0.5, loss_fails),
    "NS205": pair(kept_mean, 0, 3, loss_fails),
    "NS206": pair(unit_rows, 0.0, 0.5, loss_fails),
    "NS207": pair(log_ratio, 100.0, 10.0, loss_fails),
    "NS208": pair(counted_positions, torch.bfloat16, torch.float32, positions_collide, quiet=True),
    "NS209": pair(normalisation, 300.0, 3.0, is_bent, quiet=True),
}
