"""A penalty of gradients that has no gradient is told; gradients that are asked for on the way to
a loss for anything else are not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)


def slopes(model, x, **how):
    given = x.detach().requires_grad_()
    return torch.autograd.grad(model(given).square().sum(), given, **how)[0]


def error(model, b):
    return F.mse_loss(model(b["x"]), b["y"])


def penalty(model, b):
    return error(model, b) + slopes(model, b["x"]).square().sum(1).mean()


def of_norms(model, b):
    return error(model, b) + 10.0 * (slopes(model, b["x"]).norm(dim=1) - 1.0).square().mean()


def heard(model, b):
    return error(model, b) + slopes(model, b["x"], create_graph=True).square().sum(1).mean()


def adversarial(model, b):
    return error(model, b) + error(model, {"x": b["x"] + 0.1 * slopes(model, b["x"]), "y": b["y"]})


def adaptive(model, b):
    return error(model, b) * (1.0 + slopes(model, b["x"]).norm())


def looked_at(model, b):
    slopes(model, b["x"]).norm()
    return error(model, b)


def without(model, b):
    return error(model, b)


def given(loss):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    batch = {"x": torch.randn(12, 5), "y": torch.randn(12, 1)}
    step = FnStep(model, loss, [batch], torch.optim.SGD(model.parameters(), lr=0.1))
    return at_once(step)["objective"]


@pytest.mark.parametrize("loss", [penalty, of_norms])
def test_a_penalty_without_a_graph(loss):
    (row,) = given(loss)
    assert (row.given, row.op) == ("unheard", "autograd.grad")
    assert "torch.autograd.grad(" in row.line


@pytest.mark.parametrize("loss", [heard, adversarial, adaptive, looked_at, without])
def test_gradients_that_are_heard_or_left_out(loss):
    assert given(loss) == ()
