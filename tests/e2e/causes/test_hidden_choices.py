"""Rows of attention and choices that hide everything, and masks beyond their format."""

import pytest
import torch
from torch.nn import functional as F

from e2e.one_step import ROWS, WIDTH, said, x

OFF = torch.full((ROWS, WIDTH), -torch.inf)
ATTENTION = {
    "product": lambda net, b: net((b["v"] @ b["v"].T + b["off"][:, :ROWS]).softmax(-1) @ b["v"]),
    "einsum": lambda net, b: net(
        torch.einsum("qk,kd->qd", F.softmax(b["v"] @ b["v"].T + b["off"][:, :ROWS], -1), b["v"])
    ),
    "dropped out": lambda net, b: net(
        F.dropout((b["v"] @ b["v"].T + b["off"][:, :ROWS]).softmax(-1), 0.1) @ b["v"]
    ),
    "in float32": lambda net, b: net(
        (b["v"] @ b["v"].T + b["off"][:, :ROWS]).softmax(-1, dtype=torch.float32) @ b["v"]
    ),
}


@pytest.mark.parametrize("spelled", ATTENTION)
def test_a_row_of_attention_that_hides_every_key(spelled):
    found = said(lambda net, b: ATTENTION[spelled](net, b).sum(), v=x(), off=OFF)
    assert (found[0].code, found[0].confidence) == ("NS202", "certain")


CHOICES = {
    "router": lambda net, b: (net(b["attention"]) + OFF).softmax(-1).topk(2).values.sum(),
    "policy": lambda net, b: (
        (net(b["attention"]) + OFF).softmax(-1).gather(1, torch.zeros(ROWS, 1, dtype=torch.long))
    ).sum(),
}


@pytest.mark.parametrize("spelled", CHOICES)
def test_a_choice_that_hides_everything_is_no_attention(spelled):
    found = said(CHOICES[spelled], attention=x())
    assert "NS202" not in [one.code for one in found]


LOWEST = torch.finfo(torch.float32).min
SCALED_MASKS = {
    "divided": lambda scores, hide: (scores + hide) / 0.5,
    "times": lambda scores, hide: (scores + hide) * 3.0,
    "chosen": lambda scores, hide: torch.where(hide < 0, LOWEST, scores) / 0.7,
}


@pytest.mark.parametrize("spelled", SCALED_MASKS)
def test_a_mask_that_a_temperature_takes_beyond_its_format(spelled):
    def loss(net, b):
        scores = net(b["v"]) @ net(b["v"]).mT
        return (SCALED_MASKS[spelled](scores, b["hide"]).softmax(-1) @ net(b["v"])).square().mean()

    hide = torch.zeros(ROWS, ROWS)
    hide[2] = LOWEST
    found = said(loss, v=x(), hide=hide)
    assert found[0].code == "NS203"
    assert found[0].confidence != "possible"


def test_a_mask_in_half_precision_that_is_filled_with_too_low_a_number():
    def loss(net, batch):
        return net(batch["v"]).half().masked_fill(batch["v"] > 0, -1e9).softmax(-1).sum()

    found = said(loss, v=x())
    assert (found[0].code, found[0].confidence) == ("NS203", "certain")
