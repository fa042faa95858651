"""Rows that are asked for the token that they read, or for one after the next, are told however the
labels were shifted; rows that are asked for what they are meant to say are not.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fnstep import FnStep
from loop_scripts import findings_of
from nanstop.detect.early_steps import at_once

torch.set_num_threads(1)


class Causal(nn.Module):
    """Reads the mean of all tokens so far; ``whole``: of all tokens."""

    def __init__(self, *, whole=False):
        super().__init__()
        torch.manual_seed(0)
        self.whole = whole
        self.table, self.head, self.norm = nn.Embedding(32, 8), nn.Linear(16, 32), nn.LayerNorm(8)

    def forward(self, ids):
        h = self.norm(self.table(ids))
        count = torch.arange(1, ids.shape[1] + 1)[:, None]
        mean = h.mean(1, keepdim=True).expand_as(h) if self.whole else h.cumsum(1) / count
        return self.head(torch.cat([h, mean], dim=-1))


def shifted(by):
    """Each row against the token ``by`` places after the last that it reads."""

    def loss(m, b):
        ids = b["ids"]
        logits, labels = m(ids), ids[:, by:]
        return F.cross_entropy(logits[:, : labels.shape[1]].flatten(0, 1), labels.flatten())

    return loss


def by_hand(m, b):
    logits, labels = m(b["ids"][:, :-1])[:, :-1], b["ids"][:, 2:]
    return -logits.log_softmax(-1).gather(-1, labels[..., None]).mean()


def classes_second(m, b):
    return F.cross_entropy(m(b["ids"]).transpose(1, 2), b["ids"])


def masked_part(m, b):
    labels = b["ids"].clone()
    labels[:, :4] = -100
    return F.cross_entropy(m(b["ids"]).flatten(0, 1), labels.flatten())


class Window(nn.Module):
    """Reads the last three tokens: the same table, given tokens that are moved on by one each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(32, 8), nn.Linear(24, 32)

    def forward(self, ids):
        read = [self.table(F.pad(ids, (by, 0))[:, : ids.shape[1]]) for by in range(3)]
        return self.head(torch.cat(read, dim=-1))


def ignored_by_another_number(by, ignored=-1):
    """Texts that end early, whose labels from there on are what the loss was told to ignore."""

    def loss(m, b):
        ids = b["ids"]
        labels = F.pad(ids[:, by:], (0, by), value=ignored)
        labels[:2, 7:] = ignored
        return F.cross_entropy(m(ids).flatten(0, 1), labels.flatten(), ignore_index=ignored)

    return loss


def shifted_inside(m, b):
    """A decoder whose inputs are its labels, shifted to the right."""
    begun = torch.cat([torch.zeros_like(b["ids"][:, :1]), b["ids"][:, :-1]], dim=1)
    return F.cross_entropy(m(begun).flatten(0, 1), b["ids"].flatten())


def masked_language(m, b):
    hidden = torch.arange(12) % 3 == 0
    return F.cross_entropy(
        m(b["ids"].masked_fill(hidden, 1)).flatten(0, 1),
        b["ids"].masked_fill(~hidden, -100).flatten(),
    )


def further_head(m, b):
    return shifted(1)(m, b) + shifted(2)(m, b)


def tags(m, b):
    return F.cross_entropy(m(b["ids"]).flatten(0, 1), (b["ids"] % 5).flatten())


def given(loss, model=None):
    ids = torch.randint(2, 32, (3, 12), generator=torch.Generator().manual_seed(1))
    step = FnStep(model or Causal(), loss, [{"ids": ids}])
    return [row.given for row in at_once(step)["objective"]]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (shifted(0), "own_token"),
        (classes_second, "own_token"),
        (masked_part, "own_token"),
        (ignored_by_another_number(0), "own_token"),
        (ignored_by_another_number(2, ignored=0), "later_token"),
        (shifted(2), "later_token"),
        (by_hand, "later_token"),
    ],
)
def test_labels_in_the_wrong_place_are_told(loss, said):
    assert given(loss) == [said]


@pytest.mark.parametrize(
    "loss",
    [
        *(shifted(1), ignored_by_another_number(1), ignored_by_another_number(1, ignored=0)),
        *(shifted_inside, masked_language, further_head, tags),
    ],
    ids=lambda f: f.__name__,
)
def test_labels_that_are_meant_are_left_in_peace(loss):
    assert given(loss) == []


def test_a_window_of_tokens_is_asked_for_the_one_after_its_last():
    assert given(shifted(1), Window()) == []
    assert given(shifted(2), Window()) == ["later_token"]


def test_a_model_that_reads_all_tokens_may_be_asked_for_its_own():
    assert given(shifted(0), Causal(whole=True)) == []


class Pooled(nn.Module):
    """The mean of what each text has, of a table of tokens and one of places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places = nn.Embedding(32, 8), nn.Embedding(16, 8)

    def forward(self, ids, lengths):
        h = self.table(ids) + self.places(torch.arange(ids.shape[1])[None])
        kept = (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]
        return F.normalize((h * kept).sum(1), dim=-1)


@pytest.mark.parametrize("num", [8, 12])
@pytest.mark.parametrize("is_sorted", [False, True])
def test_texts_that_are_numbered_are_no_places_that_are_counted(num, is_sorted):
    """A text is held against all of the batch: that it is the third is no token at place 3."""
    lengths = torch.tensor([6, 10, 4, 8, 7, 9, 5, 10, 6, 7, 10, 8])[:num]
    lengths = lengths.clamp(min=6).sort().values if is_sorted else lengths
    ids = torch.randint(2, 32, (num, 10), generator=torch.Generator().manual_seed(1))

    def loss(m, b):
        scores = m(b["ids"], lengths) @ m(b["ids"].flip(1), lengths).T * 20
        return F.cross_entropy(scores, torch.arange(num))

    step = FnStep(Pooled(), loss, [{"ids": ids}])
    assert [row.given for row in at_once(step)["objective"]] == []


def test_each_line_that_shifts_is_named(tmp_path):
    def train():
        model = Causal()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            ids = torch.randint(2, 32, (3, 12))
            inputs, labels = ids[:, :-1], ids[:, 1:]
            logits = model(inputs)[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    first, second, *_ = findings_of(tmp_path, train)["NS118"].lines
    assert first.endswith("inputs, labels = ids[:, :-1], ids[:, 1:]")
    assert "labels[:, 1:].flatten()" in second
