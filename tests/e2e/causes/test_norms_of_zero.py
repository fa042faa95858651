"""Norms, ranges and magnitudes of 0, however the script spells them."""

import pytest
import torch

from e2e.one_step import ROWS, WIDTH, said, x

ZERO_NORMS = {
    "divided": lambda v: v / v.norm(dim=-1, keepdim=True),
    "times a reciprocal": lambda v: v * v.norm(dim=-1, keepdim=True).reciprocal(),
    "inverse root": lambda v: v * torch.rsqrt(v.square().sum(-1, keepdim=True)),
    "power": lambda v: v * v.pow(2).mean(-1, keepdim=True).pow(-0.5),
    "largest": lambda v: v / v.abs().amax(-1, keepdim=True),
    "deviation": lambda v: (v - v.mean(-1, keepdim=True)) / v.std(-1, keepdim=True),
    "range": lambda v: (v - v.amin()) / (v - v).abs().amax(),
    "cosine by hand": lambda v: (
        v.T @ ((v @ v.T) / (v.norm(dim=-1)[:, None] * v.norm(dim=-1)[None]))
    ),
}


@pytest.mark.parametrize("spelled", ZERO_NORMS)
def test_a_norm_of_0(spelled):
    def loss(net, batch):
        return net(ZERO_NORMS[spelled](batch["count"])[:, :1].expand(-1, WIDTH)).sum()

    found = said(loss, count=x(zero_row=2))
    assert (found[0].code, found[0].confidence) == ("NS206", "certain")


def test_the_eps_that_float16_rounds_away():
    def loss(net, batch):
        variance = batch["v"].half().pow(2).mean(-1, keepdim=True)
        return net((batch["v"].half() * torch.rsqrt(variance + 1e-12)).float()).sum()

    found = said(loss, v=x(zero_row=1))
    assert found[0].code == "NS206"
    assert any("its eps 1e-12 is 0 in float16" in line for line in found[0].lines)


def test_the_range_of_what_does_not_vary():
    def loss(net, batch):
        low, high = batch["blank"].min(), batch["blank"].max()
        return net((batch["blank"] - low) / (high - low)).sum()

    assert said(loss, blank=torch.ones(ROWS, WIDTH))[0].code == "NS206"


@pytest.mark.parametrize(
    ("spelled", "named"),
    [(torch.abs, "magnitudes"), (torch.square, "squares")],
)
def test_what_is_divided_by_a_target_is_divided_by_no_norm(spelled, named):
    target = torch.ones(ROWS, WIDTH)
    target[0, 0] = 0
    found = said(lambda net, b: ((net(b["v"]) - b["t"]) / spelled(b["t"])).sum(), v=x(), t=target)
    assert (found[0].code, found[0].title) == ("NS206", "division by a magnitude of 0")
    assert f"1 of the {ROWS * WIDTH} {named} that `div` divides by are 0" in found[0].cause
