"""What a mean was multiplied by to be a loss, as its graph says."""

import pytest
import torch
from torch.nn import functional as F

from nanstop.measure.loss_graph import loss_factor

LOGITS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
LABELS = torch.tensor([0, 1, -100, 3, -100, 2])


def summed(labels=LABELS, **more):
    return F.cross_entropy(LOGITS, labels, reduction="sum", **more)


def each():
    return F.cross_entropy(LOGITS, LABELS, reduction="none")


USED = (LABELS != -100).float()


@pytest.mark.parametrize(
    ("loss", "factor", "most"),
    [
        (F.cross_entropy(LOGITS, LABELS), 1.0, 1.0),
        (-64.0 * LOGITS.square().mean() / 4, -16.0, 64.0),
        (summed() / 4, 1.0, 1.0),
        (summed() / torch.tensor(4) * 1024, 1024.0, 1024.0),
        (summed() / 16, 0.25, 1.0),  # a micro-batch of four in a window
        (F.mse_loss(LOGITS, LOGITS.detach() + 1, reduction="sum") / 24, 1.0, 1.0),
        (LOGITS.square().sum() / 24, 1.0, 1.0),
        ((each() * USED).sum() / USED.sum(), 1.0, 1.0),
        ((USED.view(2, 3) * each().view(2, 3)).sum() / 16, 0.25, 1.0),
    ],
)
def test_a_mean_and_its_factor(loss, factor, most):
    found = loss_factor([loss])
    assert found.value == pytest.approx(factor)
    assert found.most == most


@pytest.mark.parametrize(
    "loss",
    [
        summed(),  # its rate, or a later division, knows of the number
        LOGITS.square().sum() / 6,  # of rows: each a sum
        LOGITS.sum() * 3.0,
        F.cross_entropy(LOGITS, LABELS) + LOGITS.mean(),
        F.cross_entropy(LOGITS, LABELS) * LOGITS.mean(),
        LOGITS.norm(),
        LOGITS,
        (each() * USED).sum() / 2,  # of rows of two tokens
        (each() * torch.rand(6)).sum() / 4,  # weights, of which nobody knows what they sum to
    ],
)
def test_what_is_no_mean(loss):
    assert loss_factor([loss]) is None
    assert loss_factor([loss, loss]) is None


def test_a_mean_under_a_mask_is_of_a_loss_of_torch():
    assert loss_factor([(each() * USED).sum() / USED.sum()]).is_of_torch
    assert loss_factor([(each().view(2, 3) * USED.view(2, 3)).sum() / USED.sum()]).is_of_torch
    assert not loss_factor([(LOGITS.square()[:, 0] * USED).sum() / USED.sum()]).is_of_torch
