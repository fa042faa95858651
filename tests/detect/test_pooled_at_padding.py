"""A text's state that is read at padding is told, whichever way it is read; one that is read at the
text's end is not, and neither are all states one after the other.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)
LONG, END = 8, 0
"""The token of an end is that of padding as well."""
LENGTHS = torch.tensor([3, 5, 8, 7])


class Causal(nn.Module):
    """Each state is that of its token and the mean of those before it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(20, 8, padding_idx=END), nn.Linear(16, 2)

    def forward(self, ids):
        h = self.table(ids)
        mean = h.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return torch.cat([h, mean], dim=-1)


def texts(*, left):
    ids = torch.randint(1, 20, (4, LONG), generator=torch.Generator().manual_seed(0))
    place = torch.arange(LONG).flip(0) if left else torch.arange(LONG)
    ids = ids.where(place < LENGTHS[:, None], END)
    last = torch.full((4,), LONG - 1) if left else LENGTHS - 1
    ids[torch.arange(4), last] = END
    return {"ids": ids, "last": last, "y": torch.tensor([0, 1, 0, 1])}


def by_select(m, b):
    return F.cross_entropy(m.head(m(b["ids"])[:, -1]), b["y"])


def of_outputs(m, b):
    return F.cross_entropy(m.head(m(b["ids"]))[:, -1], b["y"])


def by_index(m, b):
    last = torch.full((4,), LONG - 1)
    return F.cross_entropy(m.head(m(b["ids"])[torch.arange(4), last]), b["y"])


@pytest.mark.parametrize("loss", [by_select, of_outputs, by_index])
def test_a_read_at_padding_is_told(loss):
    found = pooled(loss, left=False)
    assert found["num_rows_pooled_at_padding"] == 3
    assert found["pooled_at"].startswith("test_pooled_at_padding.py:")


def at_the_end(m, b):
    return F.cross_entropy(m.head(m(b["ids"])[torch.arange(4), b["last"]]), b["y"])


def one_by_one(m, b):
    states = m(b["ids"])
    return sum(F.cross_entropy(m.head(states[:, place]), b["y"]) for place in range(LONG))


def of_the_first(m, b):
    return F.cross_entropy(m.head(m(b["ids"])[:, 0]), b["y"])


def not_in_the_loss(m, b):
    last = m(b["ids"])[:, -1]
    return at_the_end(m, b) + 0.0 * last.sum()


def masked(m, b):
    """What stands at the last place counts where it is a token; all places are in a mean."""
    states = m(b["ids"])
    last = states[:, -1] * (b["ids"][:, -1:] != END)
    return F.cross_entropy(m.head(states.mean(1) + last), b["y"])


@pytest.mark.parametrize(
    ("loss", "left"),
    [
        (at_the_end, False),
        (at_the_end, True),
        (by_select, True),
        (of_outputs, True),
        (one_by_one, False),
        (of_the_first, False),
        (not_in_the_loss, False),
        (masked, False),
    ],
)
def test_other_reads_are_left_in_peace(loss, left):
    assert "num_rows_pooled_at_padding" not in pooled(loss, left=left)


def pooled(loss, *, left):
    return at_once(FnStep(Causal(), loss, [texts(left=left)]))


def test_fields_that_a_table_leaves_out_are_no_padding():
    """Columns of a table, of which the last are often unknown and others now and then."""
    batch = texts(left=False)
    batch["ids"][2, 3] = END
    assert "num_rows_pooled_at_padding" not in at_once(FnStep(Causal(), by_select, [batch]))


def of_pairs(m, b):
    """The pair's first texts end at padding, the second ones nowhere: each is read at its end."""
    rows, full = torch.arange(4), torch.full((4,), LONG - 1)
    first = m.head(m(b["ids"])[rows, b["last"]])
    second = m.head(m(b["ids"].clamp(min=1))[rows, full])
    return F.cross_entropy(first - second, b["y"])


def of_bad_pairs(m, b):
    rows, full = torch.arange(4), torch.full((4,), LONG - 1)
    first = m.head(m(b["ids"].clamp(min=1))[rows, full])
    second = m.head(m(b["ids"])[rows, full])
    return F.cross_entropy(first - second, b["y"])


def by_select_of_pairs(m, b):
    first, second = m(b["ids"])[:, 0], m(b["ids"].clamp(min=1))[:, 0]
    return F.cross_entropy(m.head(first - second), b["y"])


@pytest.mark.parametrize(("loss", "num"), [(of_pairs, 0), (of_bad_pairs, 3)])
def test_of_two_texts_of_one_length_each_has_padding_of_its_own(loss, num):
    assert pooled(loss, left=False).get("num_rows_pooled_at_padding", 0) == num


def test_a_view_whose_text_is_not_known_is_left_in_peace():
    assert "num_rows_pooled_at_padding" not in pooled(by_select_of_pairs, left=True)
