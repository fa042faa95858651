"""Logarithms of numbers that were rounded to 0, or are 0."""

import pytest
import torch

from e2e.one_step import ROWS, WIDTH, said, x


def cold(net, batch):
    return (1e4 * net(batch["v"])).softmax(-1)


def test_the_logarithm_of_a_rounded_probability():
    found = said(lambda net, b: -cold(net, b).log().mean(), v=x())
    assert (found[0].code, found[0].confidence) == ("NS207", "certain")
    assert "probability" in found[0].cause


def test_the_logarithm_of_a_choice_that_is_hidden():
    def loss(net, b):
        chances = net(b["v"]).masked_fill(b["v"] > 0, -torch.inf).softmax(-1)
        return (chances * chances.log()).sum()

    found = said(loss, v=x())
    assert (found[0].code, found[0].cause) == ("NS207", "the logarithm of a probability of 0")


ROUNDED = {
    "mixture": lambda net, b: ((-(net(b["v"]).square()) - 400.0).exp() / 3.0).sum(-1).log().mean(),
    "product": lambda net, b: (net(b["v"]).sigmoid() * 1e-3).pow(20).log().mean(),
    "weighted": lambda net, b: (
        (net(b["v"]).softmax(-1) * (-1e3 * (b["v"] - 99.0).abs()).exp()).sum(-1).log().mean()
    ),
}


@pytest.mark.parametrize("spelled", ROUNDED)
def test_the_logarithm_of_a_number_that_was_rounded_to_0(spelled):
    found = said(ROUNDED[spelled], v=x())
    assert found[0].code == "NS207"
    assert found[0].cause.endswith("that was rounded to exactly 0")
    assert any("rounds to 0 what is not 0" in line for line in found[0].lines)


def test_the_logarithm_of_another_zero_has_no_story():
    found = said(lambda net, b: net(b["v"]).sum() + b["prob"].log().sum(), v=x(), prob=x(1).abs())
    assert found[0].code == "NS207"
    assert found[0].cause == "the logarithm of an exact 0"


def test_the_logarithm_within_a_distribution():
    def loss(net, b):
        policy = torch.distributions.Beta(net(b["v"]).exp() + 1, torch.ones(ROWS, WIDTH) + 1)
        return policy.log_prob(torch.ones(ROWS, WIDTH)).sum()

    found = said(loss, v=x())
    assert (found[0].code, found[0].confidence) == ("NS207", "certain")
    assert found[0].cause == "the logarithm of an exact 0"


def test_a_product_with_one_factor_of_0_was_not_rounded():
    def loss(net, b):
        factors = net(b["v"]).exp() * (torch.arange(WIDTH) > 0)
        return factors.prod(-1).log().mean()

    found = said(loss, v=x())
    assert found[0].code == "NS207"
    assert not any("rounds to 0" in line for line in found[0].lines)


def test_the_eps_of_a_logarithm_that_float16_rounds_away():
    found = said(lambda net, b: -(net(b["v"]).half().relu() + 1e-8).log().mean(), v=x())
    assert (found[0].code, found[0].cause) == ("NS207", "the logarithm of an exact 0")
    assert any("its eps 1e-08 is 0 in float16" in line for line in found[0].lines)
    assert any("finite" in line and "float64" in line for line in found[0].lines)
    assert any(atoms[0].remedy == "fp32_line" for atoms in found[0].remedies)


ANOTHER_ZERO = {
    "hidden behind the eps": lambda net, b: (
        -((net(b["v"]).half().relu() + 1e-8) * (b["v"] > 0)).log().mean()
    ),
    "no eps in half": lambda net, b: -(net(b["v"]).relu() + 1e-50).log().mean(),
}


@pytest.mark.parametrize("spelled", ANOTHER_ZERO)
def test_an_eps_that_is_not_what_is_0_is_not_blamed(spelled):
    found = said(ANOTHER_ZERO[spelled], v=x())
    assert found[0].code == "NS207"
    assert not any("is 0 in float16" in line for line in found[0].lines)


def test_the_eps_of_a_sum_of_weights_that_float16_rounds_away():
    def loss(net, b):
        weights = net(b["v"]).half().sigmoid() * b["kept"].half()
        return (net(b["v"]).half() * weights).sum(-1).div(weights.sum(-1) + 1e-16).sum()

    found = said(loss, v=x(), kept=torch.ones(ROWS, WIDTH).index_fill(0, torch.tensor(1), 0.0))
    assert found[0].code == "NS204"
    assert "a division by a sum of weights that is 0" in found[0].cause
    assert any("its eps 1e-16 is 0 in float16" in line for line in found[0].lines)
