"""Outputs that are kept from their targets are told, however the distance is written; those that
can come to them, or whose targets do not count, are left in peace.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)
KNOWN = (torch.arange(32) % 3 > 0).float()[:, None].expand(32, 4)
NOISE = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
HIGH = 20.0 + 5.0 * NOISE


def squared(m, b):
    return F.mse_loss(m(b["x"]), b["y"])


def by_hand(m, b):
    return ((b["y"] - m(b["x"])) ** 2).mean()


def absolute(m, b):
    return F.l1_loss(m(b["x"]), b["y"])


def smooth(m, b):
    return F.smooth_l1_loss(m(b["x"]), b["y"])


def masked(m, b):
    targets = torch.where(KNOWN > 0.0, b["y"].sigmoid(), -100.0)
    return ((m(b["x"]) - targets) ** 2 * KNOWN).sum() / KNOWN.sum()


def clipped_values(m, b):
    values = m(b["x"])
    old = values.detach() + 0.1 * b["y"]
    near = old + (values - old).clamp(-0.2, 0.2)
    return torch.maximum((values - 3.0 * b["y"]) ** 2, (near - 3.0 * b["y"]) ** 2).mean()


def censored(m, b):
    """Nothing is too high."""
    return F.relu(3.0 + b["y"].abs() - m(b["x"])).mean()


def shifted_scores(m, b):
    return -((m(b["x"]) - 5.0 * torch.ones(32, 4)).log_softmax(-1) * b["y"].softmax(-1)).mean()


class Affine(nn.Module):
    """Bounds that are trained: at first those of a tanh."""

    def __init__(self, *, scale=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1)) if scale else 1.0
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.scale * torch.tanh(x) + self.shift


class Beside(nn.Module):
    def forward(self, x):
        return x + torch.tanh(x)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x):
        return torch.sigmoid(self.gate(x)) * x


def rows_of(loss, last, targets):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4), last)
    batch = {"x": torch.randn(32, 6), "y": targets}
    return at_once(FnStep(model, loss, [batch]))["objective"]


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        *((squared, nn.Tanh()), (squared, nn.Sigmoid()), (squared, nn.Hardtanh())),
        *((by_hand, nn.ReLU()), (absolute, nn.Tanh()), (smooth, nn.Sigmoid())),
    ],
)
def test_outputs_that_cannot_come_to_their_targets(loss, last):
    (row,) = rows_of(loss, last, NOISE)
    assert row.given == "out_of_reach"
    low, high = last(torch.tensor(-1e9)), last(torch.tensor(1e9))
    assert row.width == int(((low > NOISE) | (high < NOISE)).sum())
    assert row.line.startswith("test_reach.py:")
    assert row.module == "3"


@pytest.mark.parametrize(
    "last",
    [
        *(nn.Identity(), Affine(), Affine(scale=True), Beside(), Gated(), nn.ReLU(), nn.Softplus()),
        *(nn.LayerNorm(4), nn.BatchNorm1d(4), nn.ELU(), nn.GELU()),
    ],
)
def test_outputs_that_can_are_left_in_peace(last):
    assert rows_of(squared, last, HIGH) == ()


@pytest.mark.parametrize(
    ("last", "targets"),
    [
        *((nn.Sigmoid(), NOISE.sigmoid()), (nn.Sigmoid(), (NOISE > 0.0).float())),
        *((nn.Tanh(), 1.03 * NOISE.tanh()), (nn.ReLU(), F.relu(NOISE) + 0.02 * NOISE)),
        (nn.Softmax(-1), F.one_hot(torch.arange(32) % 4).float()),
    ],
)
def test_targets_within_the_bounds_or_next_to_them_are_left_in_peace(last, targets):
    assert rows_of(squared, last, targets) == ()


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        *((masked, nn.Sigmoid()), (clipped_values, nn.Identity()), (clipped_values, nn.Tanh())),
        *((censored, nn.Sigmoid()), (shifted_scores, nn.Tanh())),
    ],
)
def test_numbers_that_are_no_targets_are_left_in_peace(loss, last):
    assert rows_of(loss, last, NOISE) == ()


class Settles(nn.Module):
    """Comes to rest with its own weights, and never with far larger ones."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.num_rounds = 0

    def forward(self, x):
        now, before = x, x + 1.0
        while float((now - before).detach().abs().max()) > 1e-3:
            now, before = x + 0.1 * self.inner(now).tanh().sin(), now
            self.num_rounds += 1
            if self.num_rounds > 5000:
                pytest.fail("a run that comes to no end was waited for")
            if float(self.inner.weight.detach().abs().max()) > 10.0:
                now = torch.full_like(x, self.num_rounds % 2)
        return self.out(now)


def test_a_solver_that_does_not_settle_with_other_weights_is_not_waited_for():
    assert rows_of(squared, Settles(), HIGH) == ()
