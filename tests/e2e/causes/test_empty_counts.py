"""Counts and sums of 0 that a loss divides by, however the script spells them."""

import pytest
import torch
from torch.nn import functional as F

from e2e.one_step import ROWS, WIDTH, said, x

NO_MASK = torch.zeros(ROWS, WIDTH)
EMPTY_COUNTS = {
    "divided": lambda net, b: (net(b["v"]) * b["kl"]).sum() / b["kl"].sum(),
    "by the mean": lambda net, b: (net(b["v"]) * b["kl"]).mean() / b["kl"].mean(),
    "times a reciprocal": lambda net, b: (net(b["v"]) * b["kl"]).sum() * b["kl"].sum().reciprocal(),
    "times a power": lambda net, b: (net(b["v"]) * b["kl"]).sum() * b["kl"].sum().pow(-1),
    "by rows": lambda net, b: ((net(b["v"]) * b["kl"]).sum(-1) / b["kl"].sum(-1)).mean(),
    "of what a filter leaves": lambda net, b: net(b["v"])[b["kl"].bool()].mean(),
    "of comparisons": lambda net, b: net(b["v"]).sum() / (b["v"] > 1e9).sum(),
    "by einsum": lambda net, b: (
        net(b["v"]).sum() / torch.einsum("ij,ij->", (b["v"] > 1e9).float(), (b["v"] < 1e9).float())
    ),
}


@pytest.mark.parametrize("spelled", EMPTY_COUNTS)
def test_a_count_of_0(spelled):
    found = said(EMPTY_COUNTS[spelled], v=x(), kl=NO_MASK)
    assert (found[0].code, found[0].confidence) == ("NS205", "certain")
    assert found[0].confirmed


SUMS = {
    "weights of neighbours": lambda net, b: net(b["v"]) / b["w"].sum(-1, keepdim=True),
    "overlap": lambda net, b: net(b["v"]).sum() / (F.relu(net(b["v"]) - 99) + 0 * b["w"]).sum(),
}


@pytest.mark.parametrize("spelled", SUMS)
def test_a_sum_of_0(spelled):
    weights = torch.tensor([[0.3, 0.0], [0.0, 0.0], [0.5, 1.0], [0.2, 0.2]]).repeat(1, 4)
    found = said(lambda net, b: SUMS[spelled](net, b).sum(), v=x(), w=weights)
    assert (found[0].code, found[0].confidence) == ("NS205", "certain")
    assert "sum" in found[0].cause
    assert "count" not in found[0].cause
