"""Fixes of the pages, planted beside their faults: loss and gradients are finite with them, and
those of the healthy rows are what they were.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nanstop.diagnose.catalogue import CATALOGUE

HEALTHY = torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])
ZERO, LARGE = torch.zeros(1, 3), torch.tensor([[200.0, -200.0, 0.0]])
BOUND = 1e4
"""No gradient of a row that was put right is as long."""


def masked_mean(x, floor=None):
    mask = (x != 0).float()
    count = mask.sum(-1)
    return ((x * mask).sum(-1) / (count if floor is None else count.clamp(min=floor))).sum()


def attended(x, kernel):
    """Attention over what is not 0: a row of zeros hides every key."""
    keys = torch.eye(3)
    if kernel:
        mask = (x != 0)[:, None]
        return F.scaled_dot_product_attention(x[:, None], keys, keys, mask).sum()
    scores = (x[:, None] @ keys).masked_fill((x == 0)[:, None], -torch.inf) / 3**0.5
    return (scores.softmax(-1) @ keys).sum()


def unit(x):
    return (x / x.norm(dim=-1, keepdim=True)).sum()


def unit_of_whole_rows(x):
    empty = (x == 0).all(-1, keepdim=True)
    safe = torch.where(empty, 1.0, x)
    return torch.where(empty, 0.0, x / safe.norm(dim=-1, keepdim=True)).sum()


def unit_with_a_floor(x):
    return (x / x.norm(dim=-1, keepdim=True).clamp(min=1e-3)).sum()


def squares(x):
    return x.square().sum(-1)


def root_of_what_is_positive(x):
    positive = squares(x) > 0
    return torch.where(positive, torch.where(positive, squares(x), 1.0).sqrt(), 0.0).sum()


def ratio(x, most=None):
    log_ratio = x if most is None else x.clamp(max=most)
    return log_ratio.exp().sum()


def nll(x, keep):
    labels = torch.where(x[:, 0] == 0, -100, 1)
    rows = labels != -100 if keep else slice(None)
    losses = [F.cross_entropy(r[None], y[None]) for r, y in zip(x[rows], labels[rows], strict=True)]
    return torch.stack(losses).sum()


FIXES = {
    ("NS202", 1, "a kernel"): (ZERO, lambda x: attended(x, False), lambda x: attended(x, True)),
    ("NS205", 1, "a floor of the count"): (ZERO, masked_mean, lambda x: masked_mean(x, 1.0)),
    ("NS206", 1, "whole rows"): (ZERO, unit, unit_of_whole_rows),
    ("NS206", 2, "a floor of 1e-3"): (ZERO, unit, unit_with_a_floor),
    ("NS207", 1, "log_softmax"): (
        LARGE,
        lambda x: x.softmax(-1).log().sum(),
        lambda x: x.log_softmax(-1).sum(),
    ),
    ("NS207", 1, "logsigmoid"): (
        LARGE,
        lambda x: x.sigmoid().log().sum(),
        lambda x: F.logsigmoid(x).sum(),
    ),
    ("NS207", 1, "logsumexp"): (
        LARGE,
        lambda x: x.exp().sum(-1).log().sum(),
        lambda x: x.logsumexp(-1).sum(),
    ),
    ("NS207", 2, "a clamped argument"): (LARGE, ratio, lambda x: ratio(x, 8.0)),
    ("NS304", 1, "a safe input"): (
        ZERO,
        lambda x: squares(x).sqrt().sum(),
        root_of_what_is_positive,
    ),
    ("NS304", 2, "an eps of 1e-6"): (
        ZERO,
        lambda x: squares(x).sqrt().sum(),
        lambda x: (squares(x) + 1e-6).sqrt().sum(),
    ),
    ("NS503", 3, "rows without labels filtered"): (
        ZERO,
        lambda x: nll(x, False),
        lambda x: nll(x, True),
    ),
    ("NS702", 1, "a clamped log-ratio"): (LARGE, ratio, lambda x: ratio(x, 8.0)),
}


def backpropagated(function, rows: Tensor) -> tuple[Tensor, Tensor]:
    x = rows.clone().requires_grad_()
    loss = function(x)
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize("fix", FIXES, ids=lambda fix: f"{fix[0]}.{fix[1]} {fix[2]}")
def test_a_fix_cures_its_fault_and_leaves_the_healthy_rows_alone(fix):
    fault, broken, fixed = FIXES[fix]
    rows = torch.cat([HEALTHY, fault])
    before = backpropagated(broken, rows)
    assert not all(bool(each.isfinite().all()) for each in before)
    loss, gradient = backpropagated(fixed, rows)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    assert gradient[2].norm() < BOUND
    _, right = backpropagated(broken, HEALTHY)
    assert torch.allclose(gradient[:2], right, rtol=1e-3, atol=1e-6)


def test_what_is_planted_stands_on_its_page():
    pages = {rule.code: rule.page for rule in CATALOGUE}
    for code, place, _ in FIXES:
        fixes = pages[code].partition("## Fix\n")[2].partition("## Fix safety")[0]
        assert f"\n{place}. " in "\n" + fixes


def test_a_floor_that_is_too_low_is_no_fix():
    _, gradient = backpropagated(lambda x: F.normalize(x, dim=-1).sum(), ZERO)
    assert gradient.norm() > BOUND
