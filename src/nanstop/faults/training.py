"""Planted faults of what stands around a model: its masks, its clipping, its optimizer, its data, its ranks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanstop.faults.parts import WIDTH, Model, diagonal, ones
from nanstop.faults.specimen import Specimen


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


class TwoHeads(nn.Module):
    """Two projections that share nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.near = diagonal(1.0)
        self.far = diagonal(1.0)

    def forward(self, x: Tensor, gap: Tensor) -> Tensor:
        return self.near(x).pow(2).mean() + self.far(gap).pow(2).sum(-1).sqrt().mean()


class Reducer:
    """Copies each gradient into a bucket that a second thread sends round and writes back.

    ``overlapped``: it is sent before the copy is complete. The memory of a new bucket holds NaN, as deterministic mode
    fills it; later the bucket of the step before is sent.
    """

    def __init__(self, model: nn.Module, *, overlapped: bool) -> None:
        self.overlapped = overlapped
        self.buckets: dict[Tensor, Tensor] = {
            p: torch.full_like(p, math.nan) for p in model.parameters()
        }
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: Tensor) -> None:
        bucket, gradient = self.buckets[parameter], parameter.grad
        assert gradient is not None
        mine = gradient.clone()
        communication = threading.Thread(target=gradient.copy_, args=(bucket,))
        if self.overlapped:
            communication.start()
            communication.join()
            bucket.copy_(mine)
        else:
            bucket.copy_(mine)
            communication.start()
            communication.join()


def added_masks(combine: Callable[[Tensor, Tensor], Tensor]) -> Specimen:
    """The second sample is padding only; its queries and its keys are masked, and ``combine`` joins the masks."""
    torch.manual_seed(0)
    model = Model(attention=MaskedAttention(combine))
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[1] = True
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=lambda batch: model(batch["x"], batch["padding"]).pow(2).mean(),
        batches=({"x": torch.randn(4, 6, WIDTH), "padding": padding},),
    )


def clipped(gap: float) -> Specimen:
    """A distance of ``gap`` in one row beside a healthy head, under clipping."""
    model = TwoHeads()
    apart = ones()
    apart[1, 2] = gap
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=lambda batch: model(batch["x"], batch["gap"]),
        batches=({"x": ones(), "gap": apart},),
        clip=1.0,
    )


def restored_moment(second: float) -> Specimen:
    """AdamW's state was restored with one second moment of ``second``."""
    model = Model(layer=diagonal(1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    moments = torch.full((WIDTH, WIDTH), 1e-4)
    moments[0, 0] = second
    state = {"step": torch.tensor(100.0), "exp_avg": moments * 0.0, "exp_avg_sq": moments}
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {0: state}})
    return Specimen(
        model=model,
        optimizer=optimizer,
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean(),
        batches=({"x": ones()},) * 2,
    )


def descent(lr: float) -> Specimen:
    """Gradient descent of two layers at the rate ``lr``."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        loss_fn=lambda batch: (model(batch["x"]) - batch["x"].sum(-1, keepdim=True)).pow(2).mean(),
        batches=tuple({"x": torch.randn(4, 6, WIDTH)} for _ in range(6)),
    )


def measured(size: float) -> Specimen:
    """One sample of four comes in units that make it ``size`` times larger."""
    torch.manual_seed(0)
    model = Model(layer=diagonal(1.0))
    x = torch.randn(4, 6, WIDTH)
    x[1] *= size
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=lambda batch: model(batch["features"]).pow(2).mean(),
        batches=({"features": x},),
    )


def overlapped(early: bool) -> Specimen:
    """Gradients go through a ``Reducer``, which sends them too ``early``."""
    model = Model(layer=diagonal(1.0))
    reducer = Reducer(model, overlapped=early)
    return Specimen(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=lambda batch: model(batch["x"]).pow(2).mean() * len(reducer.buckets),
        batches=({"x": ones()},),
    )
