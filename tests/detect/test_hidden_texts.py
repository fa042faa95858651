"""Models that read the padding of their texts and not the texts are told, whichever way the mask is
made; those that read both, or what they are meant to, are not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)
ROWS, LONG, PAD = 6, 10, 0
CAUSAL = torch.ones(LONG, LONG).tril().bool()


def texts(*, left=False, longest=LONG):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 30, (ROWS, LONG), generator=generator)
    lengths = torch.tensor([4, 7, 5, 8, 6, longest])[:, None]
    place = torch.arange(LONG).flip(0) if left else torch.arange(LONG)
    keep = place < lengths
    return {"ids": ids.where(keep, PAD), "keep": keep, "y": torch.arange(ROWS) % 2}


class Reader(nn.Module):
    """One layer of attention over what ``seen`` [rows, queries, keys] shows."""

    def __init__(self, outputs, *, gate=1.0, residual=True):
        super().__init__()
        torch.manual_seed(0)
        self.residual = residual
        self.table, self.mix, self.norm = nn.Embedding(30, 16), nn.Linear(16, 16), nn.LayerNorm(16)
        self.gate, self.head = nn.Parameter(torch.tensor(gate)), nn.Linear(16, outputs)

    def forward(self, ids, seen):
        h = self.norm(self.table(ids))
        scores = h @ self.mix(h).transpose(1, 2) / 4.0
        mixed = scores.masked_fill(~seen, -1e9).softmax(-1) * seen @ h
        return self.head(self.residual * h + self.gate * mixed)


class Encoder(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(30, 16), nn.Linear(16, outputs)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids, hidden):
        h = self.table(ids)
        return self.head(h + self.attention(h, h, h, key_padding_mask=hidden)[0])


class Normed(Reader):
    """Ends with a norm, which gives what its backward reads as well."""

    def __init__(self):
        super().__init__(16)
        self.last, self.read = nn.LayerNorm(16), nn.Linear(16, 2)

    def forward(self, ids, seen):
        return self.last(super().forward(ids, seen))


def classified(states, b):
    return F.cross_entropy(states, b["y"])


def next_token(logits, b):
    labels = b["ids"].masked_fill(~b["keep"], -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def first_token(m, b):
    return classified(m(b["ids"], ~b["keep"][:, None])[:, 0], b)


def by_torch(m, b):
    return classified(m(b["ids"], b["keep"])[:, 0], b)


def language(m, b):
    return next_token(m(b["ids"], ~b["keep"][:, None] & CAUSAL), b)


def regression(m, b):
    return (m(b["ids"], ~b["keep"][:, None])[:, 0, 0] - b["y"]).square().mean()


def mean_of_texts(states, b):
    weights = b["keep"][..., None].float()
    return classified((states * weights).sum(1) / weights.sum(1), b)


def mean(m, b):
    return mean_of_texts(m(b["ids"], ~b["keep"][:, None]), b)


INVERTED = [
    (mean, Reader(2), False),
    (mean, Reader(2), True),
    (first_token, Reader(2), False),
    (first_token, Reader(2, residual=False), True),
    (by_torch, Encoder(2), False),
    (language, Reader(30), False),
    (language, Reader(30), True),
    (regression, Reader(1), False),
]


@pytest.mark.parametrize(("loss", "model", "left"), INVERTED)
def test_padding_in_the_place_of_texts_is_told(loss, model, left):
    (row,) = given(loss, model, left=left, longest=9)  # of no padding no softmax is left
    assert (row.given, row.width) == ("padding", LONG)
    assert row.line.startswith("test_hidden_texts.py:")


def right_first_token(m, b):
    return classified(m(b["ids"], b["keep"][:, None])[:, 0], b)


def right_by_torch(m, b):
    return classified(m(b["ids"], ~b["keep"])[:, 0], b)


def right_language(m, b):
    return next_token(m(b["ids"], b["keep"][:, None] & CAUSAL), b)


def no_mask(m, b):
    """Right padding of a causal model needs none."""
    return next_token(m(b["ids"], CAUSAL.expand(ROWS, LONG, LONG)), b)


def mean_of_all(m, b):
    return classified(m(b["ids"], torch.ones(ROWS, LONG, LONG).bool()).mean(1), b)


def prefix(m, b):
    """The first four tokens are seen by all, those after them by what follows."""
    return next_token(m(b["ids"], b["keep"][:, None] & (CAUSAL | (torch.arange(LONG) < 4))), b)


def packed(m, b):
    """Texts of two: each part sees itself alone, the padding is a part like another."""
    part = (torch.arange(LONG) >= 2).long() + (~b["keep"]).long()
    return next_token(m(b["ids"], CAUSAL & (part[:, :, None] == part[:, None])), b)


def placeholder(m, b):
    """What fills the end is asked, and a new layer lets nothing through yet."""
    return classified(m(b["ids"], torch.ones(ROWS, LONG, LONG).bool())[:, -1], b)


def alone(m, b):
    """No token sees another one."""
    return next_token(m(b["ids"], torch.eye(LONG).bool().expand(ROWS, LONG, LONG)), b)


def right_mean(m, b):
    return mean_of_texts(m(b["ids"], b["keep"][:, None]), b)


def mean_of_parts(m, b):
    part = (torch.arange(LONG) >= 2).long() + (~b["keep"]).long()
    return mean_of_texts(m(b["ids"], part[:, :, None] == part[:, None]), b)


def mean_of_each(m, b):
    """No token of a text sees another one; all of the padding does."""
    alone = torch.eye(LONG).bool() | ~b["keep"][:, :, None]
    return mean_of_texts(m(b["ids"], alone), b)


MEANT = [
    (right_mean, Reader(2)),
    (right_mean, Reader(2, gate=0.0)),
    (mean_of_parts, Reader(2)),
    (mean_of_each, Reader(2)),
    (right_first_token, Reader(2)),
    (right_by_torch, Encoder(2)),
    (right_language, Reader(30)),
    (right_language, Reader(30, gate=0.0)),
    (no_mask, Reader(30)),
    (mean_of_all, Reader(2)),
    (prefix, Reader(30)),
    (packed, Reader(30)),
    (placeholder, Reader(2, gate=0.0)),
    (alone, Reader(30)),
]


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(("loss", "model"), MEANT)
def test_what_is_read_as_it_is_meant_is_left_in_peace(loss, model, left):
    assert given(loss, model, left=left) == ()


def given(loss, model, **options):
    return at_once(FnStep(model, loss, [texts(**options)]))["objective"]


def test_a_look_whose_runs_come_to_no_end_says_nothing_of_the_others(monkeypatch):
    def refused(*_):
        raise RuntimeError("not so")

    monkeypatch.setattr("nanstop.detect.objective.labels.misaligned_rows", refused)
    (row,) = given(first_token, Reader(2), longest=9)
    assert row.given == "padding"


def test_a_model_may_end_with_an_operation_that_gives_several_tensors(monkeypatch):
    def loss(m, b):
        return classified(m.read(m(b["ids"], b["keep"][:, None])[:, 0]), b)

    monkeypatch.setattr("nanstop.detect.early_steps._found", lambda look, *given: look(*given))
    assert given(loss, Normed(), longest=9) == ()
