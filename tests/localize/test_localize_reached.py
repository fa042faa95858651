"""Failures whose way to the loss leads through buffers, dropped NaN and infinities that look
like masks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.localize.localize import localize

torch.set_num_threads(1)


def found(model, loss_fn, **batch):
    return localize(FnStep(model, loss_fn, [batch]), 0)


class ChunkedLogProbability(torch.autograd.Function):
    """Products written into parts of one uninitialised buffer, as chunked losses do."""

    @staticmethod
    def forward(ctx, hidden, weight):
        buffer = torch.empty((8, weight.shape[0]), dtype=hidden.dtype)
        sums = []
        for start in range(0, hidden.shape[0], 6):
            chunk = hidden[start : start + 6]
            part = buffer[: chunk.shape[0]]
            torch.mm(chunk, weight.t(), out=part)
            sums.append(torch.logsumexp(part.float(), -1))
        ctx.save_for_backward(hidden)
        return torch.cat(sums)

    @staticmethod
    def backward(ctx, grad):
        (hidden,) = ctx.saved_tensors
        return grad[:, None].to(hidden.dtype) * hidden, None


class Chunked(nn.Module):
    def __init__(self, size):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8).half()
        self.weight = nn.Parameter(torch.full((16, 8), size).half())

    def forward(self, x):
        return ChunkedLogProbability.apply(self.layer(x.half()), self.weight).sum()


@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
def test_products_written_into_a_part_of_a_buffer(garbage):
    torch.empty(8 * 16, dtype=torch.float16).fill_(garbage)  # what the allocator hands out next
    x = torch.randn(10, 8, generator=torch.Generator().manual_seed(0)) * 5
    place = found(Chunked(6e4), lambda m, b: m(b["x"]), x=x)
    assert (place.key.op, place.first_bad.wider) == ("aten.mm.out", "finite")
    assert found(Chunked(1.0), lambda m, b: m(b["x"]), x=x) is None


class NanMean(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8).half()

    def forward(self, x):
        scaled = self.layer(x.half()) * 3e4
        below = scaled - scaled.max()
        return (below - below).float().nanmean()


def test_nan_that_a_mean_leaves_out_is_followed():
    x = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    place = found(NanMean(), lambda m, b: m(b["x"]), x=5 * x)
    assert (place.key.op, place.key.kind) in {
        ("aten.mul.Tensor", "+inf"),
        ("aten.mul.Tensor", "-inf"),
    }
    assert found(NanMean(), lambda m, b: m(b["x"]), x=0.01 * x) is None


def test_a_logarithm_of_ids_that_reaches_the_loss_is_no_mask():
    def loss_fn(model, batch):
        gate = (batch["ids"] != 1).float().mean() * batch["open"]
        return model(batch["x"]).square().mean() - 0.1 * torch.log(gate)

    x, ids = torch.randn(4, 8), torch.arange(4)
    place = found(nn.Linear(8, 8), loss_fn, x=x, ids=ids, open=torch.tensor(0))
    assert (place.origin, place.key.op) == ("born_here", "aten.log.default")
    assert found(nn.Linear(8, 8), loss_fn, x=x, ids=ids, open=torch.tensor(1)) is None


def spread_apart(model, batch):
    z = model(batch["x"]) / batch["spread"]
    squares = z * z
    return torch.where(batch["spread"] > 0, squares, 0.0).mean()


def spread_at_once(model, batch):
    z = model(batch["x"])
    return torch.where(batch["spread"] > 0, (z / batch["spread"]).square(), 0.0).mean()


def test_an_infinity_that_the_loss_leaves_out_is_born_where_it_was_made():
    """Its square's derivative is the first that is NaN. On a line of its own it is that trap."""
    batch = {"x": torch.randn(4, 8), "spread": torch.tensor([1.0, 0.0] * 4)}
    place = found(nn.Linear(8, 8), spread_apart, **batch)
    assert (place.key.op, place.key.phase) == ("aten.div.Tensor", "loss")
    assert place.first_bad.source.text.startswith("z = model")
    place = found(nn.Linear(8, 8), spread_at_once, **batch)
    assert (place.key.phase, place.first_bad.forward_op[:9]) == ("backward", "aten.pow.")


def test_values_that_the_program_itself_refuses():
    """No op raises: torch.distributions looks at what it is given, and so do checks of one's
    own.
    """

    def distribution(model, batch):
        return (
            -torch.distributions.Categorical(logits=model(batch["x"]), validate_args=True)
            .entropy()
            .mean()
        )

    def check(model, batch):
        logits = model(batch["x"])
        if not torch.isfinite(logits).all():
            raise ValueError("logits should be finite")
        return logits.square().mean()

    x = torch.ones(4, 8).half()
    for loss_fn in (distribution, check):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
        assert found(model, loss_fn, x=x) is None
        with torch.no_grad():
            model[0].weight.fill_(6e4)
        place = found(model, loss_fn, x=x)
        assert (place.key.module, place.key.op) == ("0", "aten.addmm.default")
        assert place.reaches == ("exception",)


class Densities(nn.Module):
    """Normal densities whose covariance is 0 at one of them: exp(-Inf) is 0, and finite."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 0.0, 2.0]))
        self.mean = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        det = self.scale * self.scale
        inv = 1.0 / det
        power = inv * (x[:, None] - self.mean).square()
        return torch.exp(-0.5 * power).sum()

    def chosen(self, x):
        det = self.scale * self.scale
        root = det.sqrt().log()
        return torch.where(det > 0, root * self.scale, 0.0).sum()

    def one_line(self, x):
        det = self.scale.abs()
        return torch.where(det > 0, det.log(), 0.0).sum()


@pytest.mark.parametrize(
    ("loss", "text", "phase"),
    [
        ("forward", "inv = 1.0 / det", "forward"),
        ("chosen", "root = det.sqrt().log()", "forward"),
        ("one_line", "return torch.where(det > 0, det.log(), 0.0).sum()", "backward"),
    ],
)
def test_an_infinity_that_a_derivative_of_another_line_reads_is_named_where_it_was_made(
    loss, text, phase
):
    place = found(Densities(), lambda m, b: getattr(m, loss)(b["x"]), x=torch.tensor([0.5, 0.1]))
    assert place.first_bad.source.text == text
    assert place.key.phase == phase
