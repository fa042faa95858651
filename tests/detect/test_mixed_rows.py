"""Rows of a loss that hold pieces of several rows of scores are told; dimensions that change
places, and products that are compared along either side, are left in peace.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)
ROWS, LENGTH, CLASSES = 3, 8, 5


def told(loss, width=CLASSES, length=LENGTH):
    torch.manual_seed(0)
    batch = {"x": torch.randn(ROWS, length, 6), "y": torch.randint(0, width, (ROWS, length))}
    rows = at_once(FnStep(nn.Linear(6, width), loss, [batch]))["objective"]
    return [(row.width, "cross_entropy" in row.line) for row in rows if row.given == "mixed"]


def viewed(m, b):
    return F.cross_entropy(m(b["x"]).view(ROWS, CLASSES, LENGTH), b["y"])


def cut(m, b):
    return F.cross_entropy(m(b["x"])[:, 1:].reshape(ROWS, CLASSES, LENGTH - 1), b["y"][:, 1:])


def warmed(m, b):
    return F.cross_entropy((m(b["x"]).double() / 0.7).reshape(ROWS, CLASSES, LENGTH), b["y"])


@pytest.mark.parametrize("loss", [viewed, cut, warmed], ids=lambda f: f.__name__)
def test_rows_of_a_loss_that_are_pieces_of_several(loss):
    assert told(loss) == [(CLASSES, True)]


def placed(m, b):
    return F.cross_entropy(m(b["x"]).transpose(1, 2), b["y"])


def copied(m, b):
    return F.cross_entropy(m(b["x"]).transpose(1, 2).contiguous(), b["y"])


def flat(m, b):
    return F.cross_entropy(m(b["x"]).view(-1, CLASSES), b["y"].view(-1))


def in_turns(m, b):
    scores = m(b["x"])[:, 0] @ torch.ones(CLASSES, ROWS)
    return F.cross_entropy(scores, torch.arange(ROWS)) + F.cross_entropy(
        scores.T, torch.arange(ROWS)
    )


@pytest.mark.parametrize("loss", [placed, copied, flat, in_turns], ids=lambda f: f.__name__)
def test_rows_of_a_loss_that_are_rows_or_columns_of_scores(loss):
    assert told(loss) == []


def test_as_many_classes_as_places():
    assert told(copied, width=LENGTH) == []


def test_several_heads_in_one():
    """Each place has three times five classes; both orders may be meant."""

    def split(m, b):
        by_class = m(b["x"]).view(-1, 5, 3)
        by_head = m(b["x"]).view(-1, 3, 5).transpose(1, 2)
        label = b["y"].view(-1, 1).expand(-1, 3) % 5
        return F.cross_entropy(by_class, label) + F.cross_entropy(by_head, label)

    assert told(split, width=15) == []
