"""Whether a failing operation has a value where all before it is computed in float64."""

import pytest
import torch
from torch import nn

from fnstep import FnStep
from nanstop.localize.localize import localize

torch.set_num_threads(1)


def found(loss_fn, dtype=torch.float32, **batch):
    torch.manual_seed(0)
    model = nn.Linear(3, 3, bias=False).to(dtype)
    with torch.no_grad():
        model.weight.copy_(torch.eye(3))
    return localize(FnStep(model, loss_fn, [batch]), 0)


FAR = torch.tensor([[1.0, 2.0, 150.0], [2.0, 1.0, 200.0]])


def kernel(x):
    return torch.exp(-x)


def sum_of(m, b):
    return (1.0 / kernel(m(b["x"])).sum(0)).sum()


def product_of(m, b):
    return (1.0 / (kernel(m(b["x"])).t() @ torch.ones(2))).sum()


def mean_of(m, b):
    return (1.0 / (kernel(m(b["x"])) * 3.0).mean(0, keepdim=True)).sum()


def added_in_place(m, b):
    total = torch.zeros(3)
    for row in kernel(m(b["x"])):
        total += row
    return (1.0 / total).sum()


def of_dropped(m, b):
    return (1.0 / kernel(nn.functional.dropout(m(b["x"]), 0.0)).sum(0)).sum()


@pytest.mark.parametrize("loss", [sum_of, product_of, mean_of, added_in_place, of_dropped])
def test_what_is_rounded_to_0_before_a_divisor_is_named(loss):
    place = found(loss, x=FAR)
    assert (place.first_bad.wider, place.in_float64) == ("nonfinite", "finite")
    assert place.vanished.name == "exp"


NEAR = torch.tensor([[1.0, 2.0, 88.0], [2.0, 1.0, 3.0]])
"""The exponential of each is a number of float32, 100 times that is none."""


def times_100(m, b):
    return (m(b["x"]).exp() * 100.0).sum()


def through_a_matrix(m, b):
    return (m(b["x"]).exp() @ torch.full((3, 2), 40.0)).sum()


def cast_between(m, b):
    return (m(b["x"]).double().exp().float()[:, 1:] * 100.0).sum()


def squared_error(m, b):
    return nn.functional.mse_loss(m(b["x"]).exp() / 2, torch.zeros(2, 3))


@pytest.mark.parametrize("loss", [times_100, through_a_matrix, cast_between, squared_error])
def test_an_exponential_that_is_multiplied_beyond_the_format_is_named(loss):
    place = found(loss, x=NEAR)
    assert place.first_bad.name != "exp"
    assert place.exploded.name == "exp"


def test_an_exponential_has_no_part_in_what_is_large_without_it():
    place = found(lambda m, b: (m(b["x"]).exp() * torch.full((3,), 1e38)).sum(), x=NEAR / 40)
    assert (place.first_bad.name, place.exploded) == ("mul", None)


def hidden(m, b):
    """The mask hides all of a column: a division by 0 whatever the exponential is."""
    return (1.0 / (kernel(m(b["x"])) * b["m"]).sum(0)).sum()


def further(m, b):
    return (1.0 / kernel(9.0 * m(b["x"])).sum(0)).sum()  # exp(-1350) is 0 in float64, too


def constant(m, b):
    return (m(b["x"]) / (b["m"] - b["m"]).sum(0)).sum()


@pytest.mark.parametrize("loss", [hidden, further, constant])
def test_a_division_by_a_0_that_float64_has_too_is_one(loss):
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    place = found(loss, x=FAR, m=mask)
    assert (place.in_float64, place.vanished) == ("nonfinite", None)


@pytest.mark.parametrize(
    ("scores", "outcome"), [([-94.8, -102.6, 1.0], "finite"), ([-1e4, 1.0, 1.0], "nonfinite")]
)
def test_a_logarithm_of_what_was_rounded(scores, outcome):
    loss = lambda m, b: -torch.log(torch.sigmoid(m(b["x"]))).mean()  # noqa: E731
    place = found(loss, x=torch.tensor([scores]))
    assert (place.in_float64, place.vanished.name) == (outcome, "sigmoid")


def test_a_number_that_is_cast_to_1_has_a_logarithm_of_its_own():
    loss = lambda m, b: (m(b["x"]).sum() - torch.log(-torch.log(b["u"].bfloat16()))).sum()  # noqa: E731
    place = found(loss, x=FAR[:, :3] / 100, u=torch.tensor([0.5, 0.9999]))
    assert place.in_float64 == "finite"


def test_numbers_that_are_drawn_are_those_of_the_run():
    def loss(m, b):
        drawn = torch.bernoulli(torch.full((3,), 0.5))
        return (1.0 / (kernel(m(b["x"])) * drawn).sum(0)).sum()

    places = {found(loss, x=FAR[:, [0, 1, 1]]).in_float64 for _ in range(2)}
    assert places == {"nonfinite"}  # seed 0 leaves one out: drawn anew, it might not
