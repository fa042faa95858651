"""Rows of a language model that have read the token they are asked for are told, with the line that
lets them; a model that reads forwards, or is meant to read all, is left in peace.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)
LENGTH = 12


class Reader(nn.Module):
    """One layer of attention beside the token itself. ``mask``: what makes it of the length."""

    def __init__(self, mask, *, batch_norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.norm = mask, nn.BatchNorm1d(8) if batch_norm else None
        self.table, self.head, self.qkv = nn.Embedding(32, 8), nn.Linear(8, 32), nn.Linear(8, 24)

    def forward(self, ids):
        x = F.dropout(self.table(ids), 0.1)
        if self.norm is not None:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = self.mask(ids.shape[1])
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class ByHand(Reader):
    def forward(self, ids):
        x = F.dropout(self.table(ids), 0.1)
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) + self.mask(ids.shape[1])
        weights = scores.softmax(-1)
        return self.head(x + weights @ v)


def forwards(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def of_numbers(length):
    return forwards(length).float()


def nothing(length):
    return torch.zeros(length, length)


def one_too_far(length):
    return torch.ones(length, length, dtype=torch.bool).tril(1)


def with_prefix(num):
    def mask(length):
        seen = forwards(length)
        seen[:, :num] = True
        return seen

    return mask


def next_token(m, b, num_ignored=0):
    ids = b["ids"]
    labels = ids[:, 1:].clone()
    labels[:, :num_ignored] = -100
    return F.cross_entropy(m(ids)[:, :-1].flatten(0, 1), labels.flatten())


def inputs_cut(m, b):
    return F.cross_entropy(m(b["ids"][:, :-1]).flatten(0, 1), b["ids"][:, 1:].flatten())


def by_hand(m, b):
    logps = m(b["ids"])[:, :-1].log_softmax(-1)
    return -logps.gather(-1, b["ids"][:, 1:, None]).mean()


def rebuilt(m, b):
    """A text is read with a beginning, and each place is asked for its own token."""
    return F.cross_entropy(m(b["ids"])[:, 1:].flatten(0, 1), b["ids"][:, 1:].flatten())


def turned_round(m, b):
    return F.cross_entropy(m(b["ids"]).flatten(0, 1), b["ids"].roll(-1, 1).flatten())


def told(loss, model):
    ids = torch.randint(2, 32, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    rows = at_once(FnStep(model, loss, [{"ids": ids}]))["objective"]
    return [row for row in rows if row.given == "ahead"]


@pytest.mark.parametrize("loss", [next_token, inputs_cut, by_hand], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("model", "line"),
    [
        (Reader(of_numbers), "scaled_dot_product_attention"),
        (ByHand(nothing), "weights @ v"),
        (Reader(one_too_far), "scaled_dot_product_attention"),
    ],
    ids=["numbers", "nothing", "one too far"],
)
def test_rows_that_have_read_what_they_are_asked_for(model, line, loss):
    (row,) = told(loss, model)
    assert line in row.made_at[0]


@pytest.mark.parametrize(
    ("loss", "model"),
    [
        (next_token, Reader(forwards)),
        (by_hand, Reader(forwards)),
        (next_token, Reader(forwards, batch_norm=True)),
        (lambda m, b: next_token(m, b, 3), Reader(with_prefix(4))),
        (lambda m, b: next_token(m, b, 8), Reader(with_prefix(9))),
        (rebuilt, Reader(nothing)),
        (turned_round, Reader(nothing)),
    ],
    ids=["forwards", "by hand", "statistics", "prefix", "long prefix", "rebuilt", "turned round"],
)
def test_rows_that_read_what_they_may(loss, model):
    assert told(loss, model) == []
