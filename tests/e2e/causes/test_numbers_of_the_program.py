"""Numbers that the program writes itself, and functions that have no value where they are asked."""

import numpy
import pytest
import torch
from torch.nn import functional as F

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


class Options:
    def __init__(self):
        self.smoothing, self.eps, self.share = 0.5, 0.0, 1.5


OPTIONS = Options()
NAMED = {
    "1 / 0": lambda net, b: net(b["v"]) / OPTIONS.eps,
    "0 / 0": lambda net, b: (net(b["v"]) * 0.0) / (1 - 2 * OPTIONS.smoothing),
    "in a function": lambda net, b: F.gumbel_softmax(net(b["v"]), tau=OPTIONS.eps),
}
SPELLED = {
    "1 / 0": "Inf from a division by `OPTIONS.eps`, which is the number 0,",
    "0 / 0": "NaN from a division by `1 - 2 * OPTIONS.smoothing`, which is the number 0: "
    "`OPTIONS.smoothing` is 0.5,",
    "in a function": "from a division by `OPTIONS.eps`, which is the number 0,",
}


@pytest.mark.parametrize("what", NAMED)
def test_an_option_that_makes_a_divisor_0_is_named(what):
    found = said(lambda net, b: NAMED[what](net, b).sum(), v=x())
    assert (found[0].code, found[0].confidence) == ("NS204", "certain")
    assert SPELLED[what] in found[0].cause
    assert found[0].usual_cure.startswith("Keep that number from 0")


def test_a_share_that_a_logarithm_has_no_value_for():
    def loss(net, b):
        return (net(b["v"]) + torch.log1p(-torch.tensor(OPTIONS.share))).sum()

    found = said(loss, v=x())
    assert (found[0].code, found[0].confidence) == ("NS204", "certain")
    assert found[0].usual_cure.startswith("Keep that number where the function has a value")


def test_an_eps_of_0_beside_a_norm_of_0_is_named():
    def loss(net, b):
        out = net(b["v"]) * b["v"]
        return (out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + OPTIONS.eps)).sum()

    found = said(loss, v=x(zero_row=1))
    assert (found[0].code, found[0].confidence) == ("NS206", "certain")
    assert "its line adds `OPTIONS.eps`, which is 0: 1e-6 is usual" in found[0].lines


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
    is_below_0 = "negative" in named or "power" in named
    assert found[0].usual_cure.startswith("Keep it from 0 on") == is_below_0


def statistics_of(v, mode, least):
    """A batch norm with a variance that is ``least`` in one place."""
    variance = torch.full((v.shape[-1],), 1.0)
    variance[3] = least
    return F.batch_norm(v, torch.zeros_like(variance), variance, training=mode)


def test_a_variance_that_is_given_below_0_is_said():
    found = said(lambda net, b: statistics_of(net(b["v"]), False, -0.5).sum(), v=x())
    assert "a variance below 0, down to -0.5" in found[0].cause


@pytest.mark.parametrize(("mode", "least"), [(True, -0.5), (False, 0.5), (False, 0.0)])
def test_a_variance_that_has_no_part_in_it_is_not_said(mode, least):
    found = said(lambda net, b: (statistics_of(net(b["v"]), mode, least) / 0.0).sum(), v=x())
    assert "variance" not in found[0].cause
