"""Sums that are made term by term in half precision are told where they lose what is added; those
whose roundings cancel out, those of float32 and residual streams are not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loop_scripts import findings_of

torch.set_num_threads(1)


class Bag(nn.Module):
    """A class by the mean of many tokens' features, added up one after the other."""

    def __init__(self, dtype, terms, shift=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 3)
        self.dtype, self.terms, self.shift = dtype, terms, shift

    def forward(self, ids):
        features = self.shift + torch.sigmoid(self.table(ids[:, : self.terms]))
        total = torch.zeros_like(features[:, 0], dtype=self.dtype)
        for place in range(self.terms):
            total = total + features[:, place].to(self.dtype)
        return self.head(total.float() / self.terms)


class Stream(nn.Module):
    """A deep residual stream in bfloat16."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(48))
        self.head = nn.Linear(8, 3)
        self.to(torch.bfloat16)

    def forward(self, ids):
        h = F.one_hot(ids[:, :8] % 8, 8).to(torch.bfloat16).sum(1)
        for layer in self.layers:
            h = h + layer(F.layer_norm(h, (8,))) / 8
        return self.head(h).float()


def train(model):
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randint(16, (4, 500))), torch.randint(3, (4,))).backward()
        optimizer.step()


def test_a_sum_that_stands_still(tmp_path):
    finding = findings_of(tmp_path, lambda: train(Bag(torch.bfloat16, 500)))["NS208"]
    assert finding.confidence == "certain"
    assert "a sum of 501 terms is kept in bfloat16" in finding.cause
    assert "total = total + features" in finding.lines[0]


@pytest.mark.parametrize(
    "model",
    [Bag(torch.float32, 500), Bag(torch.bfloat16, 24), Bag(torch.float16, 500, -0.5), Stream()],
    ids=["float32", "few terms", "terms of either sign", "a residual stream"],
)
def test_sums_that_keep_what_is_added(tmp_path, model):
    assert "NS208" not in findings_of(tmp_path, lambda: train(model))
