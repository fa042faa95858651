"""Ratios of policies, and rewards: what weighs choices, whatever it is called."""

import pytest
import torch
from torch.nn import functional as F

from e2e.one_step import ROWS, WIDTH, said, x

RATIOS = {
    "of two runs": lambda net, b: (
        (50 * net(b["v"])).log_softmax(-1) - (-500 * net(b["v"])).log_softmax(-1)
    ).exp(),
    "to noted ones": lambda net, b: (net(b["v"]).log_softmax(-1)[:, 0] - b["a"]).exp(),
}


@pytest.mark.parametrize("spelled", RATIOS)
def test_a_ratio_of_policies(spelled):
    found = said(lambda net, b: RATIOS[spelled](net, b).sum(), v=x(), a=torch.full((ROWS,), -200.0))
    assert (found[0].code, found[0].confidence) == ("NS702", "certain")


def test_a_variational_code_is_no_policy():
    def loss(net, batch):
        kl_log_ratio = 100 * net(batch["v"])
        return (kl_log_ratio.exp() + 1 - kl_log_ratio).sum()

    found = said(loss, v=5 * x())
    assert found[0].code == "NS207"
    assert "NS702" not in [one.code for one in found]


CHOSEN = torch.arange(ROWS)
BAD = torch.tensor([1.0, torch.inf, 0.0, 2.0])
REWARDED = {
    "gathered": lambda net, b: (
        net(b["v"]).log_softmax(-1).gather(1, b["i"][:, None])[:, 0] * b["a"]
    ).mean(),
    "indexed": lambda net, b: (net(b["v"]).log_softmax(-1)[range(ROWS), b["i"]] * b["a"]).sum(),
    "by cross entropy": lambda net, b: b["a"].dot(
        F.cross_entropy(net(b["v"]), b["i"], reduction="none")
    ),
    "whitened": lambda net, b: (
        (b["a"] - b["a"].mean()) * F.cross_entropy(net(b["v"]), b["i"], reduction="none")
    ).sum(),
    "a clipped ratio": lambda net, b: (
        (F.cross_entropy(net(b["v"]), b["i"], reduction="none").neg() - b["old"]).exp().clamp(0, 2)
        * b["a"]
    ).sum(),
}


@pytest.mark.parametrize("spelled", REWARDED)
def test_a_reward_is_what_weighs_choices_whatever_it_is_called(spelled):
    found = said(REWARDED[spelled], v=x(), i=CHOSEN, a=BAD, old=torch.full((ROWS,), -2.0))
    assert (found[0].code, found[0].confidence) == ("NS704", "likely")
    assert "`batch[a]`" in found[0].title


def _kl_to_noted_ones(net, b):
    logps = -F.cross_entropy(net(b["v"]), b["i"], reduction="none")
    gap = b["rewards"] - logps
    ratio = torch.exp(logps - logps.detach())
    return (-(ratio * b["v"][:, 0]) + 0.04 * ((gap.exp() - gap - 1) * ratio)).mean()


NO_REWARDS = {
    "a reference": _kl_to_noted_ones,
    "a feature": lambda net, b: F.cross_entropy(net(b["v"] * b["rewards"][:, None]), b["i"]),
    "a teacher": lambda net, b: F.kl_div(
        net(b["v"]).log_softmax(-1), b["rewards"][:, None].expand(-1, WIDTH)
    ),
    "weights of classes": lambda net, b: F.cross_entropy(
        net(b["v"])[:, :ROWS], b["i"], weight=b["rewards"]
    ),
    "a target": lambda net, b: (net(b["v"])[:, 0] - b["rewards"]).square().mean(),
}


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("spelled", NO_REWARDS)
def test_what_is_called_reward_and_weighs_no_choice_is_none(spelled):
    found = said(NO_REWARDS[spelled], v=x(), i=CHOSEN, rewards=BAD)
    assert "NS704" not in [one.code for one in found]
