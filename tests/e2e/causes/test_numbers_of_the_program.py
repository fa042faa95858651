"""Numbers that the program writes itself, and functions that have no value where they are asked."""

import numpy
import pytest
import torch

from e2e.one_step import said, x

NUMBERS = {
    "divided by 0": (lambda net, b: net(b["v"]) / 0.0, "the number 0 of the program"),
    "filled in": (
        lambda net, b: net(b["v"]).masked_fill(b["v"] > 0, -torch.inf),
        "the constant -inf",
    ),
    "written down": (
        lambda net, b: net(b["v"]) + torch.tensor([0.0] * 7 + [-torch.inf]),
        "-inf that the program writes",
    ),
    "from NumPy": (
        lambda net, b: net(b["v"]) * torch.from_numpy(numpy.array([1.0, numpy.nan] * 4)),
        "nan that the program writes",
    ),
}


@pytest.mark.parametrize("spelled", NUMBERS)
def test_a_number_of_the_program_is_named(spelled):
    loss, named = NUMBERS[spelled]
    found = said(lambda net, b: loss(net, b).sum(), v=x())
    assert found[0].code == "NS204"
    assert named in found[0].cause


def test_a_number_of_the_program_is_neither_count_nor_norm():
    found = said(lambda net, b: net(b["v"]).sum() / torch.tensor(0.0), v=x())
    assert found[0].code == "NS204"


OUTSIDE = {
    "square root": (lambda out: out.sqrt(), "the `sqrt` of negative numbers, down to -"),
    "logarithm": (lambda out: out.log2(), "the `log2` of negative numbers, down to -"),
    "logarithm of more": (lambda out: (9 * out).log1p(), "the `log1p` of numbers below -1"),
    "power": (lambda out: out**1.5, "to a power that is not whole"),
    "learned power": (
        lambda out: out.pow(out.detach().square().mean() + 0.3),
        "to a power that is not whole",
    ),
    "arc": (lambda out: (9 * out).acos(), "the `acos` of numbers beyond 1 in magnitude, by up to "),
}


@pytest.mark.parametrize("spelled", OUTSIDE)
def test_numbers_that_a_function_has_no_value_for(spelled):
    function, named = OUTSIDE[spelled]
    found = said(lambda net, b: function(net(b["v"])).sum(), v=x())
    assert (found[0].code, found[0].confidence) == ("NS204", "certain")
    assert named in found[0].cause
